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
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from determined_ds.cluster.log import LOG_POLICIES
from determined_ds.config.ds_schema import ZERO
from determined_ds.config.params import AUTO
from determined_ds.documents.document import Document, KeyPath
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

    resume: Meaning
    at: str = "HHHH"  # of each place: Honoured, or decided by the command; Refused; Ignored, with a warning
    why: str = ""  # in a clause, where it is refused or ignored
    fix: str = ""
    default: Any = None  # loses nothing by being ignored, as null and "auto"; else false, 0 and empty do


Table = Mapping[KeyPath, Fate]


def _table(*rows: tuple[Any, ...]) -> Table:
    """Rows by their keys: the letter of a ``Meaning``, several keys, and what else a :class:`Fate` has.

    Keys are separated by spaces; ``a.{b c}`` stands for two. One letter is of all places.
    """
    found: dict[KeyPath, Fate] = {}
    for letter, keys, at, *others in ((*row, "H") if len(row) == 2 else row for row in rows):
        fate = Fate(Meaning(letter), at * 4 if len(at) == 1 else at, *others)
        for section, names in re.findall(r"([\w.]+)(?:{(.+?)})?", keys, re.DOTALL):
            found |= {tuple(f"{section}{name}".split(".")): fate for name in names.split() or [""]}
    return found


# ------------------------------------------------------------------------------------------- the experiment's YAML

ON_A_CLUSTER = "applies only on a cluster"
OF_CLASSES = "Determined reads it only for entrypoints that name a class, and this one is a script"
UNUSED = "Determined 0.38.1 does nothing with it"
IN_JSON = "set it in the DeepSpeed JSON, and remove it"
OWN_WEIGHTS = "a measurement starts from the trial's own weights"
FIT = "write hyperparameters.fit."

# fmt: off
EXPERIMENT = _table(
    # ---- what is trained
    ("N", "name description labels workspace project"),
    ("C", "entrypoint reproducibility hyperparameters.trial_seed"),
    ("E", "max_restarts data debug environment.environment_variables hyperparameters"),
    ("E", "hyperparameters.fit.profiling_enabled profiling.enabled", "IHII", ON_A_CLUSTER),
    ("S", "resources.slots_per_trial hyperparameters.{pipe_within_machine partition_method pipe_schedule pipe_chunks}"),
    ("S", "hyperparameters.{pipe_parallel_size model_parallel_size sequence_parallel_size expert_parallel_size}"),
    ("J", "hyperparameters.{global_batch_size deepspeed_config overwrite_deepspeed_args zero_stage"
          " data_parallel_world_size micro_batch_size}"),
    # ---- the searcher: under run, one point is taken in the middle of the space
    ("N", "searcher"),
    ("E", "searcher.{metric smaller_is_better}"),
    ("N", "searcher.max_length", "I", OF_CLASSES, f"{FIT}max_length"),
    ("N", "searcher.stop_once", "HIIH", "every ASHA search of 0.38 stops trials early", "remove it", True),
    ("N", "searcher.{source_checkpoint_uuid source_trial_id}", "HHHI", OWN_WEIGHTS),
    # ---- the machine and the container
    ("N", "resources environment bind_mounts slurm pbs checkpoint_storage", "IHII", ON_A_CLUSTER),
    ("N", "preemption_timeout retention_policy integrations", "IHII", ON_A_CLUSTER),
    ("N", "log_policies", "IHII", ON_A_CLUSTER, "", list(LOG_POLICIES)),  # these start a run once here too
    ("N", "resources.max_slots", "IHHI", ON_A_CLUSTER),
    ("N", "resources.agent_label", "I", "Determined ignores it since 0.20", "write resources.resource_pool"),
    ("E", "profiling", "I", f"{UNUSED}, except for profiling.enabled", "remove it"),
    # ---- what is read for other kinds of trials
    ("N", "checkpoint_policy", "I", OF_CLASSES, f"{FIT}checkpoint_policy", "best"),
    ("N", "min_validation_period", "I", OF_CLASSES, f"{FIT}validation_period"),
    ("N", "min_checkpoint_period", "I", OF_CLASSES, f"{FIT}checkpoint_period"),
    ("N", "perform_initial_validation", "I", OF_CLASSES, f"{FIT}step_zero_validation"),
    ("N", "scheduling_unit", "I", OF_CLASSES, f"{FIT}reporting_period", 100),
    ("N", "records_per_epoch", "I", "it is for lengths in records, which no trial here has", "write them in epochs"),
    ("N", "optimizations", "I", "only a PyTorchTrial reads it", IN_JSON),  # determined/exec/harness.py
    ("N", "resources.native_parallel tensorboard_storage data_layer security", "I", UNUSED, "remove it"),
    ("N", "checkpoint_storage.{checkpoint_path tensorboard_path}", "I", UNUSED, "write storage_path"),
)

# ------------------------------------------------------------------------------------------- the DeepSpeed JSON

NO_LOADER = "acts in DeepSpeed's own data loader, which no trial here uses"
NOTHING = "DeepSpeed 0.19.8 reads it and does nothing with it"
OLD_NAME = "an old name of DeepSpeed's, which asks for nothing here"  # else the schema refuses it
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
    ("E", f"""{ZERO}.{{allgather_bucket_size contiguous_gradients overlap_comm reduce_bucket_size reduce_scatter
        stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters stage3_max_reuse_distance
        stage3_prefetch_bucket_size}} {ZERO}.offload_optimizer.{{buffer_count pin_memory pipeline_read pipeline_write}}
        {ZERO}.offload_param.{{buffer_count buffer_size max_in_cpu pin_memory}}"""),
    ("N", "autotuning"),
    # ---- what nothing reads
    ("E", "dataloader_drop_last", "I", NO_LOADER, "write self.training_loader(dataset, drop_last=...)"),
    ("C", "data_efficiency", "I", NO_LOADER, "have the trial's data set draw what it should"),
    ("L", "weight_quantization", "I", "DeepSpeed reads it for inference only", "remove it"),
    ("E", "disable_allgather", "I", NOTHING, "remove it"),
    ("N", "vocabulary_size", "I", "DeepSpeed only logs whether 8 divides it", "remove it"),  # runtime/config.py
    ("E", f"{ZERO}.{{cpu_offload cpu_offload_param cpu_offload_use_pin_memory"
          " stage3_gather_fp16_weights_on_model_save}", "I", OLD_NAME, "remove it", True),
    ("E", f"{ZERO}.allgather_partitions", "I", NOTHING, "remove it", True),
    # ---- what cannot be honoured
    ("L", "managed_gradient_accumulation", "R", MANAGED, "remove it", True),
    ("L", "data_parallel_size", "R", "has DeepSpeed build groups of its own", "remove it: slots decide replicas"),
    ("E", "pipeline.stages", "R", NO_ENGINE, "set hyperparameters.pipe_parallel_size in the YAML"),
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

# Those of which a key has a row of its own, and is honoured somewhere.
SECTIONS = {path[:-1] for table in (EXPERIMENT, DEEPSPEED) for path, fate in table.items() if "H" in fate.at}


def meaning_of(table: Table, path: KeyPath, otherwise: Meaning) -> Meaning:
    """What a change of a key means, by its most specific row; ``otherwise`` where it has none."""
    rows = (table[path[:end]] for end in range(len(path), 0, -1) if path[:end] in table)
    return next((row.resume for row in rows), otherwise)


def ignored_keys(document: Document, place: int) -> list[Problem]:
    """A warning for each key of an experiment that is ignored in a place; one for all that are only a cluster's.

    Args:
        document: The experiment's YAML, overrides applied.
        place: ``RUN``, ``CLUSTER``, ``SEARCH`` or ``MEASURE``.
    """
    warnings, of_clusters = [], []
    what = "is ignored: " if place == CLUSTER else "is ignored here: "
    for path, fate in _stated(document, EXPERIMENT).items():
        if fate.at[place] == "I" and fate.why == ON_A_CLUSTER:
            of_clusters.append(f"{document.key(path)} ({document.origin(path)})")
        elif fate.at[place] == "I":
            warnings.append(_problem(document, path, what + fate.why, fate.fix, "ignored-key"))
    message = f"{ON_A_CLUSTER}; ignored here: {', '.join(of_clusters)}"
    return [*([Problem(key="", message=message, code="cluster-only")] if of_clusters else []), *warnings]


def json_problems(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """The keys of a DeepSpeed JSON that cannot be honoured (errors), and those that are ignored (warnings)."""
    refused, ignored = [], []
    for path, fate in _stated(ds, DEEPSPEED).items():
        if fate.at[RUN] == "R":
            refused.append(_problem(ds, path, fate.why, fate.fix, "refused-key"))
        elif fate.at[RUN] == "I":
            ignored.append(_problem(ds, path, f"is ignored: {fate.why}", fate.fix, "ignored-key"))
    return refused, ignored


def _stated(document: Document, table: Table) -> dict[KeyPath, Fate]:
    """The fate of each key that asks for something; a section in which no key has a row of its own is one key."""

    def walk(path: KeyPath, value: Any, fate: Fate | None, depth: int) -> Iterator[tuple[KeyPath, Fate]]:
        if path in table:
            fate, depth = table[path], len(path) + (path in SECTIONS)
        if isinstance(value, dict):
            # "enabled": false switches off all that is beside it.
            for key, item in value.items() if value.get("enabled") in (None, True) else ():
                yield from walk((*path, key), item, fate, depth)
        elif fate is not None:
            asks = bool(value) if fate.default is None else value != fate.default
            if asks and value not in (None, AUTO):
                yield path[:depth], fate

    return dict(walk((), document.data, None, 0))


def _problem(document: Document, path: KeyPath, message: str, fix: str, code: str) -> Problem:
    value = document.get(path)
    shown = NOT_GIVEN if isinstance(value, (dict, list)) else value
    return document.problem(path, message, fix, code, value=shown)
