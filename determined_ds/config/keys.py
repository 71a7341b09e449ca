"""What happens to each key that a user may write: it has an effect, is refused, or is ignored with a warning.

One table is of the experiment's YAML, one of the DeepSpeed JSON. A row holds for every key below it that has no row of
its own. Keys that nobody knows are found by the schemas, and have no row here.

Source: for the YAML, the schemas and the documentation of determined 0.38.1, and its harness: ``min_validation_period``
and its like are read for trials whose entrypoint is a class (``determined/exec/harness.py``), and by no trial that a
script starts, as all of ours are. For the JSON, deepspeed 0.19.8's ``runtime/config.py`` for what is read, and
``runtime/engine.py`` for what is done with it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from determined_ds.cluster.log import LOG_POLICIES
from determined_ds.config.ds_schema import ZERO, known_keys
from determined_ds.config.params import AUTO
from determined_ds.documents.document import Document, KeyPath, dotted
from determined_ds.errors import NOT_GIVEN, Problem

# Where a configuration is used: under run, on a cluster, in a search, and measured by compare and autotune, which train
# some steps, validate and save nothing, and choose the strategy themselves.
RUN, CLUSTER, SEARCH, MEASURE = range(4)


class Meaning(enum.Enum):
    """What a change of a key means to a run that resumes from a checkpoint, by its letter in the tables."""

    LAYOUT = "L"  # must be as it was: a checkpoint is laid out by it
    STRATEGY = "S"  # may change, where the checkpoint's tensors can be read under any strategy
    OPTIMIZER = "O"  # must be as it was, unless the optimizer's state begins anew
    COURSE = "C"  # must be as it was: the batches trained so far count by it
    EFFECT = "E"  # takes effect from now on
    NOTHING = "N"  # has no effect on a run that has begun
    RESOLVED = "J"  # is compared in what it makes: the JSON that DeepSpeed is given


class Fate(NamedTuple):
    """What happens to a key, and to every key below it that has no row of its own."""

    key: str
    resume: Meaning
    at: str = "HHHH"  # of each place: Honoured, or decided by the command; Refused; Ignored, with a warning
    why: str = ""  # in a clause, where it is refused or ignored
    fix: str = ""
    default: Any = None  # loses nothing by being ignored, as null and "auto"; else false, 0 and empty do


def _table(*rows: tuple[Any, ...]) -> dict[str, Fate]:
    """Rows by their keys: the letter of a ``Meaning``, several keys, and what else a :class:`Fate` has.

    Keys are separated by spaces; ``a.{b c}`` stands for two. One letter is of all places.
    """
    found = {}
    for resume, keys, *rest in rows:
        at, others = (rest[0] if rest else "HHHH"), rest[1:]
        section = ""
        for word in keys.split():
            head, opened, name = word.rpartition("{")
            section = head if opened else section
            key = section + name.rstrip("}")
            found[key] = Fate(key, Meaning(resume), at * 4 if len(at) == 1 else at, *others)
            section = "" if word.endswith("}") else section
    return found


# ------------------------------------------------------------------------------------------- the experiment's YAML

ON_A_CLUSTER = "applies only on a cluster"
OF_CLASSES = "Determined reads it only for entrypoints that name a class, and this one is a script"
UNUSED = "Determined 0.38.1 does nothing with it"
NO_MORE = "Determined ignores it"
IN_JSON = "set it in the DeepSpeed JSON, and remove it"
IN_EPOCHS = "write fit's lengths in epochs, which the data counts"
FIT = "write hyperparameters.fit."
SOURCE_TRIAL = "give source_checkpoint_uuid a run directory or a checkpoint path"

# fmt: off
EXPERIMENT = _table(
    # ---- what is trained
    ("N", "name description labels workspace project"),
    ("C", "entrypoint reproducibility hyperparameters.trial_seed"),
    ("E", "max_restarts data debug environment.environment_variables hyperparameters"),
    ("E", "hyperparameters.fit.profiling_enabled profiling.enabled", "IHII", ON_A_CLUSTER),
    ("E", "hyperparameters.{logging fit torch_compile sdpa_kernel}"),
    ("S", "resources.slots_per_trial hyperparameters.{pipe_within_machine partition_method pipe_schedule pipe_chunks}"),
    ("S", "hyperparameters.{pipe_parallel_size model_parallel_size sequence_parallel_size expert_parallel_size}"),
    ("J", "hyperparameters.{global_batch_size deepspeed_config overwrite_deepspeed_args zero_stage"
          " data_parallel_world_size micro_batch_size}"),
    # ---- the searcher: under run, one point is taken in the middle of the space
    ("N", "searcher"),
    ("E", "searcher.{metric smaller_is_better}"),
    ("N", "searcher.max_length", "I", OF_CLASSES, f"{FIT}max_length"),
    ("N", "searcher.stop_once", "HIIH", "every ASHA search of 0.38 stops trials early", "remove it", True),
    ("N", "searcher.source_checkpoint_uuid", "HHHI", "a measurement starts from the trial's own weights"),
    ("N", "searcher.source_trial_id", "RHRI", "names a cluster's trial", SOURCE_TRIAL),
    # ---- the machine and the container
    ("N", "resources environment bind_mounts slurm pbs checkpoint_storage", "IHII", ON_A_CLUSTER),
    ("N", "preemption_timeout retention_policy integrations", "IHII", ON_A_CLUSTER),
    ("N", "log_policies", "IHII", ON_A_CLUSTER, "", list(LOG_POLICIES)),  # these start a run once here too
    ("N", "resources.max_slots", "IHHI", ON_A_CLUSTER),
    ("N", "resources.slots", "R", "is for notebooks and commands", "write resources.slots_per_trial"),
    ("N", "resources.native_parallel", "I", UNUSED, "remove it"),
    ("N", "resources.agent_label", "I", f"{NO_MORE} since 0.20", "write resources.resource_pool"),
    # ---- what is kept and shown
    ("N", "checkpoint_storage.{checkpoint_path tensorboard_path}", "I", NO_MORE, "write storage_path"),
    ("E", "profiling", "I", f"{UNUSED}, except for profiling.enabled", "remove it"),
    # ---- what is read for other kinds of trials
    ("N", "checkpoint_policy", "I", OF_CLASSES, f"{FIT}checkpoint_policy", "best"),
    ("N", "min_validation_period", "I", OF_CLASSES, f"{FIT}validation_period"),
    ("N", "min_checkpoint_period", "I", OF_CLASSES, f"{FIT}checkpoint_period"),
    ("N", "perform_initial_validation", "I", OF_CLASSES, f"{FIT}step_zero_validation"),
    ("N", "scheduling_unit", "I", OF_CLASSES, f"{FIT}reporting_period", 100),
    ("N", "records_per_epoch", "I", OF_CLASSES, IN_EPOCHS),
    ("N", "optimizations", "I", OF_CLASSES, IN_JSON),
    ("N", "optimizations.{average_training_metrics average_aggregated_gradients}", "I", OF_CLASSES, IN_JSON, True),
    ("N", "optimizations.{aggregation_frequency tensor_fusion_cycle_time}", "I", OF_CLASSES, IN_JSON, 1),
    ("N", "optimizations.tensor_fusion_threshold", "I", OF_CLASSES, IN_JSON, 64),
    ("N", "optimizations.mixed_precision", "I", OF_CLASSES, "enable bf16 in the DeepSpeed JSON", "O0"),
    ("N", "tensorboard_storage", "I", UNUSED, "remove it: checkpoint_storage is used"),
    ("N", "data_layer security", "I", UNUSED, "remove it"),
    ("N", "internal", "R", "has been removed from Determined", "remove it"),
)

# ------------------------------------------------------------------------------------------- the DeepSpeed JSON

NO_LOADER = "acts in DeepSpeed's own data loader, which no trial here uses"
NOTHING = "DeepSpeed 0.19.8 reads it and does nothing with it"
BACKGROUND = "writes in the background, so that a checkpoint would be sealed before it is whole"
NO_ENGINE = "no engine reads it"  # runtime/config.py get_pipeline_config: PipelineModule takes these as arguments
MANAGED = "has every micro-batch followed by an optimizer step, since the loop leaves the count to DeepSpeed"
UNIVERSAL = "has the engine look for a universal checkpoint, and checkpoints here are DeepSpeed's own"
NODE_LOCAL = "has every machine write the same files, and they are stored together"
AUTOTUNING = "has the engine end its process after some steps, for a launcher of DeepSpeed's that is not here"

# The places are alike here.
DEEPSPEED = _table(
    ("C", "train_batch_size data_efficiency.{enabled data_routing}"),
    ("O", "optimizer optimizer.params.{adam_w_mode amsgrad}"),
    ("L", "scheduler weight_quantization.quantized_initialization hybrid_engine sequence_parallel_size"),
    ("L", "use_data_before_expert_parallelism"),
    ("E", "train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping activation_checkpointing"),
    ("E", "optimizer.params scheduler.params communication_data_type seq_parallel_communication_data_type"),
    ("S", "optimizer.params.{fp32_optimizer_states torch_adam} optimizer.legacy_fusion torch_autocast fp16 bf16"),
    ("S", f"zero_force_ds_cpu_optimizer tensor_parallel data_types expert_parallel {ZERO}"),
    ("E", "compile disable_python_gc wall_clock_breakdown memory_breakdown steps_per_print dump_state log_level"),
    ("E", "flops_profiler comms_logger tensorboard csv_monitor wandb comet aio timers pipeline checkpoint"),
    ("E", "gradient_predivide_factor zero_allow_untested_optimizer prescale_gradients gradient_allreduce_op"),
    # Those of zero_optimization by which no checkpoint is laid out.
    ("E", f"""{ZERO}.{{allgather_bucket_size allgather_sequential contiguous_gradients enable_sanity_checks
        gather_16bit_weights_on_model_save ignore_unused_parameters log_trace_cache_warnings max_live_parameters
        max_reuse_distance memory_efficient_linear overlap_comm pipeline_loading_checkpoint prefetch_bucket_size
        reduce_bucket_size reduce_scatter stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save
        stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size
        stage3_use_all_reduce_for_fetch_params use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce}}"""),
    ("E", f"""{ZERO}.offload_optimizer.{{buffer_count cpuadam_cores_perc fast_init pin_memory pipeline_read
        pipeline_write}} {ZERO}.offload_param.{{buffer_count buffer_size max_in_cpu pin_memory}}"""),
    ("N", "autotuning"),
    # ---- what nothing reads
    ("E", "dataloader_drop_last", "I", NO_LOADER, "write self.training_loader(dataset, drop_last=...)"),
    ("C", "data_efficiency", "I", NO_LOADER, "have the trial's data set draw what it should"),
    ("L", "weight_quantization", "I", "DeepSpeed reads it for inference only", "remove it"),
    ("N", "vocabulary_size", "I", "DeepSpeed only remarks on it where 8 does not divide it", "remove it"),
    ("E", "disable_allgather", "I", NOTHING, "remove it"),
    ("E", f"{ZERO}.allgather_partitions", "I", NOTHING, "remove it", True),
    # ---- what cannot be honoured
    ("L", "managed_gradient_accumulation", "R", MANAGED, "remove it", True),
    ("L", f"{ZERO}.legacy_stage1", "R", "has been removed from DeepSpeed", "remove it"),
    ("L", "data_parallel_size", "R", "has DeepSpeed build groups of its own", "remove it: slots decide replicas"),
    ("E", "pipeline.stages", "R", NO_ENGINE, "set hyperparameters.pipe_parallel_size in the YAML", AUTO),
    ("E", "pipeline.partition", "R", NO_ENGINE, "remove it, and set hyperparameters.partition_method", "best"),
    ("E", "pipeline.seed_layers", "R", NO_ENGINE, "remove it"),
    ("N", "autotuning.enabled", "R", AUTOTUNING, "remove it, and use det-ds autotune CONFIG"),
    ("L", "checkpoint.load_universal", "R", UNIVERSAL, "remove it"),
    ("E", "checkpoint.use_node_local_storage", "R", NODE_LOCAL, "remove it: each rank's part is stored anyway"),
    ("E", "checkpoint.writer.decoupled", "R", BACKGROUND, "remove it"),
    ("L", "datastates_ckpt", "R", BACKGROUND, "remove it"),
)
# fmt: on


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
    found = _keys_that_are("I", document, place, EXPERIMENT, frozenset({("profiling",)}))
    of_clusters = [path for row, path in found if row.why == ON_A_CLUSTER]
    what = "is ignored: " if place == CLUSTER else "is ignored here: "
    warnings = [
        _problem(document, row, path, what, "ignored-key") for row, path in found if row.why != ON_A_CLUSTER
    ]
    if of_clusters:
        keys = ", ".join(f"{document.key(path)} ({document.origin(path)})" for path in of_clusters)
        message = f"{ON_A_CLUSTER}; ignored here: {keys}"
        warnings.insert(0, Problem(key="", message=message, code="cluster-only"))
    return warnings


def json_problems(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """The keys of a DeepSpeed JSON that cannot be honoured (errors), and those that are ignored (warnings)."""
    refused = _keys_that_are("R", ds, RUN, DEEPSPEED, _switched())
    ignored = _keys_that_are("I", ds, RUN, DEEPSPEED, _switched())
    return (
        [_problem(ds, row, path, "", "refused-key") for row, path in refused],
        [_problem(ds, row, path, "is ignored: ", "ignored-key") for row, path in ignored],
    )


@cache
def _switched() -> frozenset[KeyPath]:
    """The sections of the JSON that do nothing unless their ``enabled`` is true; a timer's is on by default."""

    def walk(path: KeyPath, node: dict[str, Any]) -> Iterator[KeyPath]:
        keys = node.get("properties", {})
        if "enabled" in keys and path != ("timers", "throughput"):
            yield path
        for key, child in keys.items():
            yield from walk((*path, key), child)

    return frozenset(walk((), known_keys()))


def _keys_that_are(
    letter: str, document: Document, place: int, table: Mapping[str, Fate], switched: frozenset[KeyPath]
) -> list[tuple[Fate, KeyPath]]:
    """The keys to which it happens in a place, I or R, each once; not those of ``switched`` sections that are off."""

    def leaves(path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Any]]:
        if not isinstance(value, dict):
            yield path, value
        elif path not in switched or value.get("enabled") is True:
            for key, item in value.items():
                yield from leaves((*path, key), item)

    found: dict[KeyPath, Fate] = {}
    for row in table.values():
        above: KeyPath = tuple(row.key.split("."))
        given = document.get(above) if row.at[place] == letter else None
        if given is None or (above[:1] in switched and document.get((above[0], "enabled")) is not True):
            continue
        # A section is named as a whole, but key by key where one of them fares otherwise or has a fix of its own.
        below = [each.at[place] for key, each in table.items() if key.rpartition(".")[0] == row.key]
        by_key = any(each != letter for each in below) or bool(below and row.why != ON_A_CLUSTER)
        for path, value in leaves(above, given):
            default = row.default
            says_nothing = value == default if default is not None else not value
            if value not in (None, AUTO) and not says_nothing and row_of(table, path) is row:
                found.setdefault(path[: len(above) + by_key], row)
    return [(row, path) for path, row in found.items()]


def _problem(document: Document, row: Fate, path: KeyPath, what: str, code: str) -> Problem:
    value: Any = document.get(path, NOT_GIVEN)
    shown = NOT_GIVEN if isinstance(value, (dict, list)) else value
    return document.problem(path, what + row.why, row.fix, code, value=shown)
