"""What happens to each key that a user may write: honoured, refused, decided by the command, or ignored with a warning.

One table is of the experiment's YAML, one of the DeepSpeed JSON. A row holds for every key below it that has no row of
its own. Keys that nobody knows are found by the schemas, and have no row here.

Source: for the YAML, the schemas and the documentation of determined 0.38.1, and its harness: ``min_validation_period``
and its like are read for trials whose entrypoint is a class (``determined/exec/harness.py``), and by no trial that a
script starts, as all of ours are. For the JSON, deepspeed 0.19.8's ``runtime/config.py`` for what is read, and
``runtime/engine.py`` for what is done with it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from determined_ds.cluster_log import LOG_POLICIES
from determined_ds.config.ds_schema import known_keys
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import NOT_GIVEN, Problem

# Where a configuration is used. `ddp`, only in the DeepSpeed JSON's table, is torch's engine in a comparison.
RUN, CLUSTER, SEARCH, MEASURE, DDP = range(5)
HONOURED, REFUSED, IGNORED, DECIDED = "HRID"


class Meaning(enum.Enum):
    """What a change of a key means to a run that resumes from a checkpoint, by its letter in the tables."""

    LAYOUT = "L"  # must be as it was: a checkpoint is laid out by it
    STRATEGY = "S"  # may change, where the checkpoint's tensors can be read under any strategy
    OPTIMIZER = "O"  # must be as it was, unless the optimizer's state begins anew
    COURSE = "C"  # must be as it was: the batches trained so far count by it
    EFFECT = "E"  # takes effect from now on
    NOTHING = "N"  # has no effect on a run that has begun
    RESOLVED = "J"  # is compared in what it makes: the JSON that DeepSpeed is given


@dataclass(frozen=True)
class Fate:
    """What happens to a key, and to every key below it that has no row of its own.

    Args:
        key: Dotted.
        at: A letter for each place, in their order: ``H`` honoured; ``R`` refused; ``I`` ignored, with a warning; ``D``
            decided by the command, whose help and output say so: no warning.
        resume: What a change means to a run that resumes.
        why: In a clause, where it is refused or ignored.
        fix: What to write instead; "" where there is nothing better to write.
        default: The value at which nothing is lost by ignoring the key. Null, "auto", false, 0 and what is empty lose
            nothing either, unless a default is stated.
    """

    key: str
    at: str
    resume: Meaning
    why: str
    fix: str = ""
    default: Any = None

    def is_idle(self, value: Any) -> bool:
        """Whether nothing is asked for by a value."""
        if value is None or value == "auto":
            return True
        return bool(value == self.default) if self.default is not None else not value


def _rows(letters: str, keys: str, why: str = "", fix: str = "", default: Any = None) -> list[Fate]:
    """A row for each of several keys, separated by spaces; ``a.{b,c}`` stands for two.

    Args:
        letters: What happens in each place, and after a space what a change means to a run that resumes.
        keys: Dotted.
        why: See :class:`Fate`, as for the rest.
        fix: What to write instead.
        default: The value at which nothing is lost.
    """
    at, resume = letters.split()
    found = []
    for word in keys.split():
        prefix, _, names = word.partition("{")
        for name in names.rstrip("}").split(",") if names else [""]:
            found.append(Fate(prefix + name, at, Meaning(resume), why, fix, default))
    return found


def _table(*groups: list[Fate]) -> dict[str, Fate]:
    return {row.key: row for group in groups for row in group}


# ------------------------------------------------------------------------------------------- the experiment's YAML

ON_A_CLUSTER = "applies only on a cluster"
OF_CLASSES = "Determined reads it only for entrypoints that name a class, and this one is a script"
UNUSED = "Determined 0.38.1 does nothing with it"
IN_JSON = "set it in the DeepSpeed JSON, and remove it"
FIT = "write hyperparameters.fit."

# Letters: under run, on a cluster, in a search, and measured by compare and autotune, which train some steps, validate
# and save nothing, and choose the strategy themselves.
EXPERIMENT = _table(
    # What is trained
    _rows("HHHH N", "name description labels workspace project"),
    _rows("HHHH C", "entrypoint reproducibility hyperparameters.trial_seed"),
    _rows("HHHH E", "data debug hyperparameters environment.environment_variables"),
    _rows("HHHD E", "max_restarts hyperparameters.logging hyperparameters.fit"),
    _rows(
        "HHHH S",
        """hyperparameters.{pipe_within_machine,partition_method,model_parallel_size} resources.slots_per_trial
        hyperparameters.{expert_parallel_size,sequence_parallel_size}""",
    ),
    _rows("HHHD S", "hyperparameters.{pipe_parallel_size,pipe_schedule,pipe_chunks}"),
    _rows("HHHH E", "hyperparameters.{torch_compile,sdpa_kernel}"),
    _rows("HHHH J", "hyperparameters.{global_batch_size,deepspeed_config,overwrite_deepspeed_args}"),
    _rows("HHHD J", "hyperparameters.{data_parallel_world_size,zero_stage,micro_batch_size}"),
    # The searcher: under run, one point is taken in the middle of the space
    _rows("DHHD N", "searcher"),
    _rows("HHHD E", "searcher.{metric,smaller_is_better}"),
    _rows("IIII N", "searcher.max_length", OF_CLASSES, f"{FIT}max_length"),
    _rows("DIID N", "searcher.stop_once", "every ASHA search of 0.38 stops trials early", "remove it", True),
    _rows("HHHI N", "searcher.source_checkpoint_uuid", "a measurement starts from the trial's own weights"),
    _rows(
        "RHRI N",
        "searcher.source_trial_id",
        "names a cluster's trial",
        "give source_checkpoint_uuid a run directory or a checkpoint path",
    ),
    # The machine and the container
    _rows(
        "IHII N",
        """resources environment bind_mounts slurm pbs preemption_timeout retention_policy integrations
        checkpoint_storage""",
        ON_A_CLUSTER,
    ),
    _rows(
        "IHII N", "log_policies", ON_A_CLUSTER, default=list(LOG_POLICIES)
    ),  # these start a run once here too
    _rows("IHHI N", "resources.max_slots", ON_A_CLUSTER),
    _rows("RRRR N", "resources.slots", "is for notebooks and commands", "write resources.slots_per_trial"),
    _rows("IIII N", "resources.native_parallel", UNUSED, "remove it"),
    _rows(
        "IIII N", "resources.agent_label", "Determined ignores it since 0.20", "write resources.resource_pool"
    ),
    # What is kept and shown
    _rows(
        "IIII N",
        "checkpoint_storage.{checkpoint_path,tensorboard_path}",
        "Determined ignores it",
        "write checkpoint_storage.storage_path",
    ),
    _rows("IIII E", "profiling", f"{UNUSED}, except for profiling.enabled", "remove it"),
    _rows("HHHI E", "profiling.enabled", "nothing but the steps is measured"),
    # What is read for other kinds of trials
    _rows("IIII N", "checkpoint_policy", OF_CLASSES, f"{FIT}checkpoint_policy", "best"),
    _rows("IIII N", "min_validation_period", OF_CLASSES, f"{FIT}validation_period"),
    _rows("IIII N", "min_checkpoint_period", OF_CLASSES, f"{FIT}checkpoint_period"),
    _rows("IIII N", "perform_initial_validation", OF_CLASSES, f"{FIT}step_zero_validation"),
    _rows("IIII N", "scheduling_unit", OF_CLASSES, f"{FIT}reporting_period", 100),
    _rows("IIII N", "records_per_epoch", OF_CLASSES, "write fit's lengths in epochs, which the data counts"),
    _rows("IIII N", "optimizations", OF_CLASSES, IN_JSON),
    _rows(
        "IIII N",
        "optimizations.{average_training_metrics,average_aggregated_gradients}",
        OF_CLASSES,
        IN_JSON,
        True,
    ),
    _rows("IIII N", "optimizations.{aggregation_frequency,tensor_fusion_cycle_time}", OF_CLASSES, IN_JSON, 1),
    _rows("IIII N", "optimizations.tensor_fusion_threshold", OF_CLASSES, IN_JSON, 64),
    _rows("IIII N", "optimizations.mixed_precision", OF_CLASSES, "enable bf16 in the DeepSpeed JSON", "O0"),
    _rows("IIII N", "tensorboard_storage", UNUSED, "remove it: checkpoint_storage is used"),
    _rows("IIII N", "data_layer security", UNUSED, "remove it"),
    _rows("RRRR N", "internal", "has been removed from Determined", "remove it"),
)

# ------------------------------------------------------------------------------------------- the DeepSpeed JSON

NO_LOADER = "acts in DeepSpeed's own data loader, which no trial here uses"
NOTHING = "DeepSpeed 0.19.8 reads it and does nothing with it"
BACKGROUND = "writes in the background, so that a checkpoint would be sealed before it is whole"

# Letters: as above, and for the engine ``ddp``. ``D`` there is how DeepSpeed does its work: ``ddp`` does without.
DEEPSPEED = _table(
    _rows("HHHHH C", "train_batch_size"),
    _rows("HHHDH E", "train_micro_batch_size_per_gpu gradient_accumulation_steps"),
    _rows("HHHHH O", "optimizer optimizer.params.{adam_w_mode,amsgrad}"),
    _rows("HHHHH L", "scheduler"),
    _rows(
        "HHHHH E",
        "optimizer.params scheduler.params gradient_clipping communication_data_type activation_checkpointing",
    ),
    _rows(
        "HHHHH S",
        """optimizer.params.{fp32_optimizer_states,torch_adam} torch_autocast bf16.enabled
        fp16.{enabled,loss_scale,initial_scale_power,loss_scale_window}""",
    ),
    _rows(
        "HHHHD S",
        """optimizer.legacy_fusion bf16.immediate_grad_update zero_optimization zero_force_ds_cpu_optimizer
        tensor_parallel""",
    ),
    _rows("HHHHI S", "bf16 fp16 torch_autocast.lower_precision_safe_modules data_types expert_parallel"),
    _rows("HHHHI E", "gradient_allreduce_op", default="mean"),
    _rows(
        "HHHHI E",
        """compile disable_python_gc wall_clock_breakdown memory_breakdown steps_per_print dump_state
        flops_profiler comms_logger log_level tensorboard csv_monitor wandb comet""",
    ),
    # Those of zero_optimization are the ones by which no checkpoint is laid out.
    _rows(
        "HHHHD E",
        """prescale_gradients gradient_predivide_factor zero_allow_untested_optimizer aio timers pipeline
        seq_parallel_communication_data_type zero_optimization.{allgather_bucket_size,allgather_sequential}
        zero_optimization.{contiguous_gradients,enable_sanity_checks,gather_16bit_weights_on_model_save}
        zero_optimization.{ignore_unused_parameters,log_trace_cache_warnings,max_live_parameters}
        zero_optimization.{max_reuse_distance,memory_efficient_linear,overlap_comm,pipeline_loading_checkpoint}
        zero_optimization.{prefetch_bucket_size,reduce_bucket_size,reduce_scatter,stage3_allgather_sequential}
        zero_optimization.{stage3_gather_16bit_weights_on_model_save,stage3_max_live_parameters}
        zero_optimization.{stage3_max_reuse_distance,stage3_prefetch_bucket_size}
        zero_optimization.{stage3_use_all_reduce_for_fetch_params,use_all_reduce_for_fetch_params}
        zero_optimization.use_multi_rank_bucket_allreduce
        zero_optimization.offload_optimizer.{buffer_count,cpuadam_cores_perc,fast_init,pin_memory}
        zero_optimization.offload_optimizer.{pipeline_read,pipeline_write}
        zero_optimization.offload_param.{buffer_count,buffer_size,max_in_cpu,pin_memory}""",
    ),
    _rows("HHHHI L", "weight_quantization.quantized_initialization hybrid_engine"),
    _rows("HHHHD L", "sequence_parallel_size data_parallel_size use_data_before_expert_parallelism"),
    _rows("HHHHD C", "data_efficiency.{enabled,data_routing}"),
    _rows("HHHHD N", "autotuning"),
    _rows("HHHDD E", "checkpoint"),
    # What nothing reads
    _rows("IIIII E", "dataloader_drop_last", NO_LOADER, "write self.training_loader(dataset, drop_last=...)"),
    _rows("IIIII C", "data_efficiency", NO_LOADER, "have the trial's data set draw what it should"),
    _rows("IIIII L", "weight_quantization", "DeepSpeed reads it for inference only", "remove it"),
    _rows(
        "IIIII N", "vocabulary_size", "DeepSpeed only remarks on it where 8 does not divide it", "remove it"
    ),
    _rows("IIIII E", "disable_allgather", NOTHING, "remove it"),
    _rows("IIIII E", "zero_optimization.allgather_partitions", NOTHING, "remove it", True),
    # What cannot be honoured
    _rows(
        "RRRRR L",
        "managed_gradient_accumulation",
        "has every micro-batch followed by an optimizer step, since the loop leaves the count to DeepSpeed",
        "remove it",
        True,
    ),
    _rows("RRRRR L", "zero_optimization.legacy_stage1", "has been removed from DeepSpeed", "remove it"),
    # runtime/config.py get_pipeline_config: PipelineModule takes these as arguments.
    _rows(
        "RRRRR E",
        "pipeline.stages",
        "no engine reads it",
        "set hyperparameters.pipe_parallel_size in the experiment's YAML",
        "auto",
    ),
    _rows(
        "RRRRR E",
        "pipeline.partition",
        "no engine reads it",
        "set hyperparameters.partition_method, and remove it here",
        "best",
    ),
    _rows("RRRRR E", "pipeline.seed_layers", "no engine reads it", "remove it"),
    _rows(
        "RRRRR N",
        "autotuning.enabled",
        "has the engine end its process after some steps, for a launcher of DeepSpeed's that is not here",
        "remove it, and use det-ds autotune CONFIG",
    ),
    _rows(
        "RRRRR L",
        "checkpoint.load_universal",
        "has the engine look for a universal checkpoint, and checkpoints here are DeepSpeed's own",
        "remove it",
    ),
    _rows(
        "RRRRR E",
        "checkpoint.use_node_local_storage",
        "has every machine write the same files, and they are stored together",
        "remove it: each rank's part goes to checkpoint_storage",
    ),
    _rows("RRRRR E", "checkpoint.writer.decoupled", BACKGROUND, "remove it"),
    _rows("RRRRR L", "datastates_ckpt", BACKGROUND, "remove it"),
)


@cache
def _switched() -> frozenset[KeyPath]:
    """The sections of the JSON that do nothing unless their ``enabled`` is true; a timer's is on by default."""
    found: set[KeyPath] = set()

    def walk(path: KeyPath, node: dict[str, Any]) -> None:
        keys = node.get("properties", {})
        if "enabled" in keys and path != ("timers", "throughput"):
            found.add(path)
        for key, child in keys.items():
            walk((*path, key), child)

    walk((), known_keys())
    return frozenset(found)


# ------------------------------------------------------------------------------------------- a document by a table


def row_of(table: Mapping[str, Fate], path: KeyPath) -> Fate | None:
    """The most specific row of a key; None where it has none."""
    ends = (table.get(dotted(path[:end])) for end in range(len(path), 0, -1))
    return next((row for row in ends if row is not None), None)


def ignored_keys(document: Document, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in a place; one for all that are only a cluster's.

    Args:
        document: The experiment's YAML, overrides applied.
        place: ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``.
    """
    found = _keys_that_are(IGNORED, document, place, EXPERIMENT, frozenset({("profiling",)}))
    of_clusters = [path for row, path in found if row.why == ON_A_CLUSTER]
    what = "is ignored" if place == CLUSTER else "is ignored here"
    return [
        *_together(document, of_clusters, "applies only on a cluster; ignored here", "cluster-only"),
        *(_problem(document, row, path, what) for row, path in found if row.why != ON_A_CLUSTER),
    ]


def json_problems(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """The keys of a DeepSpeed JSON that cannot be honoured (errors), and those that are ignored (warnings)."""
    refused = _keys_that_are(REFUSED, ds, RUN, DEEPSPEED, _switched())
    ignored = _keys_that_are(IGNORED, ds, RUN, DEEPSPEED, _switched())
    return (
        [_problem(ds, row, path, "") for row, path in refused],
        [_problem(ds, row, path, "is ignored") for row, path in ignored],
    )


def ignored_by_ddp(ds: Document) -> list[Problem]:
    """A warning of the keys that DeepSpeed reads and torch's DistributedDataParallel, measured beside it, does not."""
    found = _keys_that_are(IGNORED, ds, DDP, DEEPSPEED, _switched())
    paths = [path for row, path in found if row.at[RUN] != IGNORED]
    return _together(ds, paths, "the strategy ddp is torch's alone; ignored in its rows", "ddp-only")


def _keys_that_are(
    letter: str, document: Document, place: int, table: Mapping[str, Fate], switched: frozenset[KeyPath]
) -> list[tuple[Fate, KeyPath]]:
    """The keys of a document to which something happens in a place, each once, in the order of the document.

    Args:
        letter: What happens: ``I`` or ``R``.
        document: An experiment or a DeepSpeed JSON.
        place: One of the places.
        table: Of that document.
        switched: Sections that do nothing unless their ``enabled`` is true.
    """
    found: dict[KeyPath, Fate] = {}
    for path, value in _leaves(document.data, (), switched):
        row = row_of(table, path)
        if row is None or row.at[place] != letter or row.is_idle(value):
            continue
        # A section is named as a whole, but key by key where one of them fares otherwise or has a fix of its own.
        below = [each.at[place] for key, each in table.items() if key.rpartition(".")[0] == row.key]
        by_key = any(each != letter for each in below) or bool(below and row.why != ON_A_CLUSTER)
        found.setdefault(path[: row.key.count(".") + 1 + by_key], row)
    return [(row, path) for path, row in found.items()]


def _leaves(
    section: dict[Any, Any], path: KeyPath, switched: frozenset[KeyPath]
) -> Iterator[tuple[KeyPath, Any]]:
    if path in switched and section.get("enabled") is not True:
        return
    for key, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key), switched)
        else:
            yield (*path, key), value


def _problem(document: Document, row: Fate, path: KeyPath, what: str) -> Problem:
    value: Any = document.get(path, NOT_GIVEN)
    shown = NOT_GIVEN if isinstance(value, (dict, list)) else value
    message, code = (f"{what}: {row.why}", "ignored-key") if what else (row.why, "refused-key")
    return document.problem(path, message, row.fix, code, value=shown)


def _together(document: Document, paths: Sequence[KeyPath], what: str, code: str) -> list[Problem]:
    if not paths:
        return []
    keys = ", ".join(f"{document.key(path)} ({document.origin(path)})" for path in paths)
    return [Problem(key="", message=f"{what}: {keys}", code=code)]
