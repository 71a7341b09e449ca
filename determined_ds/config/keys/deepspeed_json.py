"""What happens to each key of a DeepSpeed JSON, which is the same under ``run``, on a cluster, and in a search.

The letters of a row are for run, cluster, search, measured, and for the engine ``ddp`` of a comparison (see
:class:`~determined_ds.config.keys.row.Row`). ``H`` is what DeepSpeed does by itself in the engines that the trials make
and the loop drives, or what the library does for it. ``D`` under ``ddp`` is how DeepSpeed does its work: ``ddp`` is
measured without. Keys that DeepSpeed has removed, and old names, are refused or renamed before (``deepspeed_json.py``,
``old_names.py``), and have no row.

Source: deepspeed 0.19.8, ``runtime/config.py`` for what is read, ``runtime/engine.py`` for what is done with it.
"""

from __future__ import annotations

from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.keys.row import rows, table_of
from determined_ds.documents.document import KeyPath

DONE = "DeepSpeed does it in the engine"
SHOWN = "rank 0 prints it"
NO_LOADER = "acts in DeepSpeed's own data loader, which no trial here uses"
NOTHING = "DeepSpeed 0.19.8 reads it and does nothing with it"
BACKGROUND = "writes in the background, so that a checkpoint would be sealed before it is whole"
ZERO, WRITER = "zero_optimization", "checkpoint.writer"

DEEPSPEED = table_of(
    # ------------------------------------------------------------------------------------------------ the batch
    rows("train_batch_size", "HHHHH", "the global batch stays, whatever the strategy"),
    rows(
        "{train_micro_batch_size_per_gpu,gradient_accumulation_steps}", "HHHDH", "a strategy cuts the batch"
    ),
    rows(
        "managed_gradient_accumulation",
        "RRRRR",
        "has every micro-batch followed by an optimizer step, since the loop leaves the count to DeepSpeed",
        "remove it",
        True,
    ),
    rows("dataloader_drop_last", "IIIII", NO_LOADER, "write self.training_loader(dataset, drop_last=...)"),
    rows("data_efficiency.enabled", "HHHHD", "switches the two sections below it"),
    rows("data_efficiency", "IIIII", NO_LOADER, "have the trial's data set draw what it should"),
    rows(
        "data_efficiency.data_routing",
        "HHHHD",
        "the engine schedules random-LTD's layers, where the model has any",
    ),
    # ----------------------------------------------------------------------------------------- what is computed
    rows("{optimizer,scheduler}", "HHHHH", "unless the trial's build_optimizer returns its own optimizer"),
    rows("optimizer.legacy_fusion", "HHHHD", DONE),
    rows("gradient_clipping", "HHHHH", DONE),
    rows("{bf16,fp16}", "HHHHI", DONE),
    rows("bf16.enabled fp16.{enabled,loss_scale,initial_scale_power,loss_scale_window}", "HHHHH", DONE),
    rows("bf16.immediate_grad_update", "HHHHD", DONE),
    rows("torch_autocast", "HHHHH", DONE),
    rows("torch_autocast.lower_precision_safe_modules", "HHHHI", DONE),
    rows("data_types", "HHHHI", DONE),
    rows("gradient_allreduce_op", "HHHHI", DONE, "", "mean"),
    rows("{prescale_gradients,gradient_predivide_factor,communication_data_type}", "HHHHD", DONE),
    rows(
        "activation_checkpointing",
        "HHHHH",
        "options of deepspeed.checkpointing.checkpoint, for what calls it",
    ),
    rows(
        "compile", "HHHHI", "compile.deepcompile compiles, as torch_compile does; the others are its options"
    ),
    rows("weight_quantization", "IIIII", "DeepSpeed reads it for inference only", "remove it"),
    rows("weight_quantization.quantized_initialization", "HHHHI", "zero.Init does it"),
    rows("vocabulary_size", "IIIII", "DeepSpeed only remarks on it where 8 does not divide it", "remove it"),
    rows("disable_allgather", "IIIII", NOTHING, "remove it"),
    # ------------------------------------------------------------------------------------------ how it is carried out
    rows(ZERO, "HHHHD", DONE),
    rows(f"{ZERO}.allgather_partitions", "IIIII", NOTHING, "remove it", True),
    rows(f"{ZERO}.legacy_stage1", "RRRRR", "has been removed from DeepSpeed", "remove it"),
    rows("{zero_allow_untested_optimizer,zero_force_ds_cpu_optimizer,aio}", "HHHHD", DONE),
    rows(
        "{tensor_parallel,sequence_parallel_size,data_parallel_size}", "HHHHD", "as model_parallel_size says"
    ),
    rows("{seq_parallel_communication_data_type,use_data_before_expert_parallelism}", "HHHHD", DONE),
    rows("expert_parallel", "HHHHI", "DeepSpeed replaces the model's experts"),
    rows("hybrid_engine", "HHHHI", "the engine can generate, where the trial calls it"),
    rows("pipeline", "HHHHD", "a PipelineTrial's engine does it"),
    rows("pipeline.stages", "RRRRR", "no engine reads it", "set hyperparameters.pipe_parallel_size", "auto"),
    rows(
        "pipeline.partition",
        "RRRRR",
        "no engine reads it",
        "set partition_method in the PipelineTrial",
        "best",
    ),
    rows("pipeline.seed_layers", "RRRRR", "no engine reads it", "remove it"),
    rows("disable_python_gc", "HHHHI", "the engine switches it off"),
    rows("autotuning", "HHHHD", "does nothing unless it is enabled"),
    rows(
        "autotuning.enabled",
        "RRRRR",
        "has the engine end its process after some steps, for a launcher of DeepSpeed's that is not here",
        "remove it, and use det-ds autotune CONFIG",
    ),
    # ---------------------------------------------------------------------------------------------- checkpoints
    rows("checkpoint", "HHHDD", "in the engine's part of a checkpoint"),
    rows(
        "checkpoint.load_universal",
        "RRRRR",
        "has the engine look for a universal checkpoint, and checkpoints here are DeepSpeed's own",
        "remove it",
    ),
    rows(
        "checkpoint.use_node_local_storage",
        "RRRRR",
        "has every machine write the same files, and they are stored together",
        "remove it: each rank's part goes to checkpoint_storage",
    ),
    rows(f"{WRITER}.decoupled", "RRRRR", BACKGROUND, "remove it"),
    rows("datastates_ckpt", "RRRRR", BACKGROUND, "remove it"),
    # ------------------------------------------------------------------------------------------- what is printed
    rows("{wall_clock_breakdown,memory_breakdown,steps_per_print,dump_state}", "HHHHI", SHOWN),
    rows("{flops_profiler,comms_logger,log_level}", "HHHHI", SHOWN),
    rows("timers", "HHHHD", "times what steps_per_print prints; on GPUs off, unless either is stated"),
    rows(
        "{tensorboard,csv_monitor}",
        "HHHHI",
        "written below the run's tensorboard folder, if not to an absolute path",
    ),
    rows("{wandb,comet}", "HHHHI", "DeepSpeed sends it"),
)

# Sections that do nothing unless they are enabled; of a timer alone it is the default.
ON_BY_DEFAULT = frozenset({("timers", "throughput")})


def switched() -> frozenset[KeyPath]:
    """The sections of the JSON that do nothing unless their ``enabled`` is true."""
    found: set[KeyPath] = set()

    def walk(path: KeyPath, node: dict[str, object]) -> None:
        keys = node.get("keys")
        if isinstance(keys, dict):
            if "enabled" in keys and path not in ON_BY_DEFAULT:
                found.add(path)
            for key, child in keys.items():
                walk((*path, key), child)

    walk((), known_keys())
    return frozenset(found)
