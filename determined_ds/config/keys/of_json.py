"""What happens to each key of a DeepSpeed JSON, which is the same under ``run``, on a cluster, and in a search.

The letters of a row are for run, cluster, search, measured, and for the engine ``ddp`` of a comparison (see
:class:`~determined_ds.config.keys.fate.Fate`). ``H`` is what DeepSpeed does by itself in the trials' engines, or what
the library does for it. ``D`` under ``ddp`` is how DeepSpeed does its work: ``ddp`` is
measured without. Keys that DeepSpeed has removed, and old names, are refused or renamed before (``deepspeed_json.py``,
``old_names.py``), and have no row.

Source: deepspeed 0.19.8, ``runtime/config.py`` for what is read, ``runtime/engine.py`` for what is done with it.
"""

from __future__ import annotations

from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.keys.fate import rows, table_of
from determined_ds.documents.document import KeyPath

DONE = "DeepSpeed does it in the engine"
SHOWN = "rank 0 prints it"
NO_LOADER = "acts in DeepSpeed's own data loader, which no trial here uses"
NOTHING = "DeepSpeed 0.19.8 reads it and does nothing with it"
BACKGROUND = "writes in the background, so that a checkpoint would be sealed before it is whole"
ZERO, WRITER = "zero_optimization", "checkpoint.writer"
# Keys of ZeRO by which no checkpoint is laid out.
ZERO_IN_EFFECT = """allgather_bucket_size allgather_sequential contiguous_gradients enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters log_trace_cache_warnings max_live_parameters
    max_reuse_distance memory_efficient_linear offload_optimizer.buffer_count offload_optimizer.cpuadam_cores_perc
    offload_optimizer.fast_init offload_optimizer.pin_memory offload_optimizer.pipeline_read
    offload_optimizer.pipeline_write offload_param.buffer_count offload_param.buffer_size offload_param.max_in_cpu
    offload_param.pin_memory overlap_comm pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size
    reduce_scatter stage3_allgather_sequential stage3_gather_16bit_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce"""

DEEPSPEED = table_of(
    # ------------------------------------------------------------------------------------------------ the batch
    rows("train_batch_size", "HHHHH C", "the global batch stays, whatever the strategy"),
    rows(
        "{train_micro_batch_size_per_gpu,gradient_accumulation_steps}", "HHHDH E", "a strategy cuts the batch"
    ),
    rows(
        "managed_gradient_accumulation",
        "RRRRR L",
        "has every micro-batch followed by an optimizer step, since the loop leaves the count to DeepSpeed",
        "remove it",
        True,
    ),
    rows("dataloader_drop_last", "IIIII E", NO_LOADER, "write self.training_loader(dataset, drop_last=...)"),
    rows("data_efficiency.enabled", "HHHHD C", "switches the two sections below it"),
    rows("data_efficiency", "IIIII C", NO_LOADER, "have the trial's data set draw what it should"),
    rows(
        "data_efficiency.data_routing",
        "HHHHD C",
        "the engine schedules random-LTD's layers, where the model has any",
    ),
    # ----------------------------------------------------------------------------------------- what is computed
    rows("optimizer", "HHHHH O", "unless the trial's build_optimizer returns its own optimizer"),
    rows("scheduler", "HHHHH L", "unless the trial's build_scheduler returns its own schedule"),
    rows("optimizer.params scheduler.params", "HHHHH E", DONE),
    rows("optimizer.params.{adam_w_mode,amsgrad}", "HHHHH O", DONE),
    rows("optimizer.params.{fp32_optimizer_states,torch_adam}", "HHHHH S", DONE),
    rows("optimizer.legacy_fusion", "HHHHD S", DONE),
    rows("gradient_clipping", "HHHHH E", DONE),
    rows("{bf16,fp16}", "HHHHI S", DONE),
    rows("bf16.enabled fp16.{enabled,loss_scale,initial_scale_power,loss_scale_window}", "HHHHH S", DONE),
    rows("bf16.immediate_grad_update", "HHHHD S", DONE),
    rows("torch_autocast", "HHHHH S", DONE),
    rows("torch_autocast.lower_precision_safe_modules", "HHHHI S", DONE),
    rows("data_types", "HHHHI S", DONE),
    rows("gradient_allreduce_op", "HHHHI E", DONE, "", "mean"),
    rows("{prescale_gradients,gradient_predivide_factor}", "HHHHD E", DONE),
    rows("communication_data_type", "HHHHH E", f"{DONE}, and a hook of torch's for ddp"),
    rows(
        "activation_checkpointing",
        "HHHHH E",
        "options of deepspeed.checkpointing.checkpoint, for what calls it",
    ),
    rows(
        "compile",
        "HHHHI E",
        "compile.deepcompile compiles, as torch_compile does; the others are its options",
    ),
    rows("weight_quantization", "IIIII L", "DeepSpeed reads it for inference only", "remove it"),
    rows("weight_quantization.quantized_initialization", "HHHHI L", "zero.Init does it"),
    rows(
        "vocabulary_size", "IIIII N", "DeepSpeed only remarks on it where 8 does not divide it", "remove it"
    ),
    rows("disable_allgather", "IIIII E", NOTHING, "remove it"),
    # ------------------------------------------------------------------------------------------ how it is carried out
    rows(ZERO, "HHHHD S", DONE),
    *(rows(f"{ZERO}.{key}", "HHHHD E", DONE) for key in ZERO_IN_EFFECT.split()),
    rows(f"{ZERO}.allgather_partitions", "IIIII E", NOTHING, "remove it", True),
    rows(f"{ZERO}.legacy_stage1", "RRRRR L", "has been removed from DeepSpeed", "remove it"),
    rows("zero_allow_untested_optimizer aio", "HHHHD E", DONE),
    rows("zero_force_ds_cpu_optimizer", "HHHHD S", DONE),
    rows("tensor_parallel", "HHHHD S", "with model_parallel_size: AutoTP cuts the model's layers"),
    rows("{sequence_parallel_size,data_parallel_size}", "HHHHD L", "as sequence_parallel_size says"),
    rows("seq_parallel_communication_data_type", "HHHHD E", DONE),
    rows("use_data_before_expert_parallelism", "HHHHD L", DONE),
    rows("expert_parallel", "HHHHI S", "DeepSpeed divides the model's experts"),
    rows("hybrid_engine", "HHHHI L", "the engine can generate, where the trial calls it"),
    rows("pipeline", "HHHHD E", "a PipelineTrial's engine does it"),
    rows(
        "pipeline.stages", "RRRRR E", "no engine reads it", "set hyperparameters.pipe_parallel_size", "auto"
    ),
    rows(
        "pipeline.partition",
        "RRRRR E",
        "no engine reads it",
        "set hyperparameters.partition_method",
        "best",
    ),
    rows("pipeline.seed_layers", "RRRRR E", "no engine reads it", "remove it"),
    rows("disable_python_gc", "HHHHI E", "the engine switches it off"),
    rows("autotuning", "HHHHD N", "does nothing unless it is enabled"),
    rows(
        "autotuning.enabled",
        "RRRRR N",
        "has the engine end its process after some steps, for a launcher of DeepSpeed's that is not here",
        "remove it, and use det-ds autotune CONFIG",
    ),
    # ---------------------------------------------------------------------------------------------- checkpoints
    rows("checkpoint", "HHHDD E", "in the engine's part of a checkpoint"),
    rows(
        "checkpoint.load_universal",
        "RRRRR L",
        "has the engine look for a universal checkpoint, and checkpoints here are DeepSpeed's own",
        "remove it",
    ),
    rows(
        "checkpoint.use_node_local_storage",
        "RRRRR E",
        "has every machine write the same files, and they are stored together",
        "remove it: each rank's part goes to checkpoint_storage",
    ),
    rows(f"{WRITER}.decoupled", "RRRRR E", BACKGROUND, "remove it"),
    rows("datastates_ckpt", "RRRRR L", BACKGROUND, "remove it"),
    # ------------------------------------------------------------------------------------------- what is printed
    rows("{wall_clock_breakdown,memory_breakdown,steps_per_print,dump_state}", "HHHHI E", SHOWN),
    rows("{flops_profiler,comms_logger,log_level}", "HHHHI E", SHOWN),
    rows("timers", "HHHHD E", "times what steps_per_print prints; on GPUs off, unless either is stated"),
    rows(
        "{tensorboard,csv_monitor}",
        "HHHHI E",
        "written below the run's tensorboard folder, if not to an absolute path",
    ),
    rows("{wandb,comet}", "HHHHI E", "DeepSpeed sends it"),
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
