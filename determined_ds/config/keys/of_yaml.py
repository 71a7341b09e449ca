"""What happens to each key of an experiment YAML: under ``run``, on a cluster, under ``search``, and measured.

The four letters of a row are for these four places (see :class:`~determined_ds.config.keys.fate.Fate`). ``compare`` and
``autotune`` measure: they train some steps, validate and save nothing, and choose the strategy themselves.

Source: what a master of determined 0.38.1 and its agents do with a key is read from its schemas ``expconf/v0`` and its
documentation, what the harness does from its code: ``min_validation_period`` and its like are read for trials whose
entrypoint is a class (``determined/exec/harness.py``), and by no trial that a script starts, as all of ours are.
"""

from __future__ import annotations

from determined_ds.cluster_log import LOG_POLICIES
from determined_ds.config.keys.fate import ON_A_CLUSTER, rows, table_of

NAMES = "only names things; kept in experiment.yaml"
OF_CLASSES = "Determined reads it only for entrypoints that name a class, and this one is a script"
UNUSED = "Determined 0.38.1 does nothing with it"
IN_JSON = "set it in the DeepSpeed JSON, and remove it"
FIT = "write hyperparameters.fit.{}"
MEASURED = "a measurement trains --warmup and --steps, and neither validates nor saves"

EXPERIMENT = table_of(
    # ---------------------------------------------------------------------------------------- what is trained
    rows("name", "HHHH N", "names the run directory too"),
    rows("description labels workspace project", "HHHH N", NAMES),
    rows("entrypoint", "HHHH C", "says which trial to train; the launcher before it is the cluster's"),
    rows("data", "HHHH E", "context.get_experiment_config() and get_data_config() give it to the trial"),
    rows("reproducibility", "HHHH C", "seeds everything"),
    rows("debug", "HHHH E", "more is logged"),
    rows("max_restarts", "HHHD E", "a measurement that fails becomes a failed row"),
    # -------------------------------------------------------------------------------------------- the searcher
    rows("searcher", "DHHD N", "one point is taken, in the middle of the space, and named"),
    rows("searcher.{metric,smaller_is_better}", "HHHD E", "a measurement goes by the speed"),
    rows("searcher.max_length", "IIII N", OF_CLASSES, FIT.format("max_length")),
    rows("searcher.stop_once", "DIID N", "every ASHA search of 0.38 stops trials early", "remove it", True),
    rows("searcher.source_checkpoint_uuid", "HHHI N", "a measurement starts from the trial's own weights"),
    rows(
        "searcher.source_trial_id",
        "RHRI N",
        "names a cluster's trial",
        "give source_checkpoint_uuid a run directory or a checkpoint path",
    ),
    # ---------------------------------------------------------------------------- the library's hyperparameters
    rows("hyperparameters", "HHHH E", "all others belong to the model"),
    rows("hyperparameters.global_batch_size", "HHHH J", "every strategy trains the same batch"),
    rows("hyperparameters.data_parallel_world_size", "HHHD J", "the strategy decides it"),
    rows("hyperparameters.pipe_parallel_size", "HHHD S", "the strategy decides it"),
    rows("hyperparameters.{pipe_schedule,pipe_chunks}", "HHHD S", "the strategy decides it"),
    rows("hyperparameters.pipe_within_machine", "HHHH S", "the order of ranks"),
    rows("hyperparameters.partition_method", "HHHH S", "autotune also tries others"),
    rows(
        "hyperparameters.model_parallel_size",
        "HHHH S",
        "DeepSpeed's AutoTP carries it out, or the trial's own mpu",
    ),
    rows("hyperparameters.expert_parallel_size", "HHHH S", "DeepSpeed's AutoEP divides the experts"),
    rows(
        "hyperparameters.sequence_parallel_size",
        "HHHH S",
        "each rank of a replica trains a slice of its sequences",
    ),
    rows(
        "hyperparameters.{deepspeed_config,overwrite_deepspeed_args}",
        "HHHH J",
        "see the DeepSpeed JSON's table; a strategy overwrites them",
    ),
    rows(
        "hyperparameters.{zero_stage,micro_batch_size}",
        "HHHD J",
        "overwrites the DeepSpeed JSON; a strategy decides it",
    ),
    rows(
        "hyperparameters.trial_seed", "HHHH C", "the trial's seed, instead of the one that a searcher draws"
    ),
    rows("hyperparameters.{torch_compile,sdpa_kernel}", "HHHH E", "autotune also tries others"),
    rows("hyperparameters.logging", "HHHD E", "a measurement is reported to no tool"),
    rows("hyperparameters.fit", "HHHD E", MEASURED),
    rows("hyperparameters.fit.{max_length,validation_period,checkpoint_period}", "HHHD E", MEASURED),
    rows("hyperparameters.fit.{reporting_period,checkpoint_policy}", "HHHD E", MEASURED),
    rows("hyperparameters.fit.{step_zero_validation,save_total_limit}", "HHHD E", MEASURED),
    rows("hyperparameters.fit.asynchronous_checkpoints", "HHHD E", MEASURED),
    rows(
        "hyperparameters.fit.warm_start",
        "HHHD E",
        "says what is taken of searcher.source_checkpoint_uuid's checkpoint",
    ),
    rows("hyperparameters.fit.profiling_enabled", "HHHD E", "nothing but the steps is measured"),
    rows(
        "hyperparameters.fit.profile",
        "HHHD E",
        "det-ds profile states the steps; other measurements record none",
    ),
    rows("hyperparameters.fit.breakdown", "HHHD E", "nothing but the steps is measured"),
    rows("hyperparameters.fit.stop_on_nan", "HHHD E", "a measurement always stops at NaN"),
    # ------------------------------------------------------------------------------- the machine and the container
    rows("resources", "IHII N", ON_A_CLUSTER),
    rows("resources.slots_per_trial", "HHHH S", "ranks to start; --slots replaces it"),
    rows("resources.max_slots", "IHHI N", ON_A_CLUSTER),
    rows("resources.slots", "RRRR N", "is for notebooks and commands", "write resources.slots_per_trial"),
    rows("resources.native_parallel", "IIII N", UNUSED, "remove it"),
    rows(
        "resources.agent_label", "IIII N", "Determined ignores it since 0.20", "write resources.resource_pool"
    ),
    rows("environment", "IHII N", ON_A_CLUSTER),
    rows("environment.environment_variables", "HHHH E", "set for the ranks"),
    rows("bind_mounts", "IHII N", ON_A_CLUSTER),
    rows("slurm pbs", "IHII N", ON_A_CLUSTER),
    rows("preemption_timeout retention_policy integrations", "IHII N", ON_A_CLUSTER),
    # What these name is started once in a run here too.
    rows("log_policies", "IHII N", ON_A_CLUSTER, default=list(LOG_POLICIES)),
    # ------------------------------------------------------------------------------------- what is kept and shown
    rows("checkpoint_storage", "IHII N", ON_A_CLUSTER),
    rows(
        "checkpoint_storage.{save_experiment_best,save_trial_best,save_trial_latest}",
        "HHHD E",
        "checkpoints that are kept at the end of an experiment; a measurement writes none",
    ),
    rows(
        "checkpoint_storage.{checkpoint_path,tensorboard_path}",
        "IIII N",
        "Determined ignores it",
        "write checkpoint_storage.storage_path",
    ),
    rows("profiling", "IIII E", f"{UNUSED}, except for profiling.enabled", "remove it"),
    rows("profiling.enabled", "HHHI E", "nothing but the steps is measured"),
    # -------------------------------------------------------------------------------- read for other kinds of trials
    rows("checkpoint_policy", "IIII N", OF_CLASSES, FIT.format("checkpoint_policy"), "best"),
    rows("min_validation_period", "IIII N", OF_CLASSES, FIT.format("validation_period")),
    rows("min_checkpoint_period", "IIII N", OF_CLASSES, FIT.format("checkpoint_period")),
    rows("perform_initial_validation", "IIII N", OF_CLASSES, FIT.format("step_zero_validation")),
    rows("scheduling_unit", "IIII N", OF_CLASSES, FIT.format("reporting_period"), 100),
    rows("records_per_epoch", "IIII N", OF_CLASSES, "write fit's lengths in epochs, which the data counts"),
    rows("optimizations", "IIII N", OF_CLASSES, IN_JSON),
    rows(
        "optimizations.{average_training_metrics,average_aggregated_gradients}",
        "IIII N",
        OF_CLASSES,
        IN_JSON,
        True,
    ),
    rows("optimizations.{aggregation_frequency,tensor_fusion_cycle_time}", "IIII N", OF_CLASSES, IN_JSON, 1),
    rows("optimizations.tensor_fusion_threshold", "IIII N", OF_CLASSES, IN_JSON, 64),
    rows("optimizations.mixed_precision", "IIII N", OF_CLASSES, "enable bf16 in the DeepSpeed JSON", "O0"),
    rows("tensorboard_storage", "IIII N", UNUSED, "remove it: checkpoint_storage is used"),
    rows("data_layer security", "IIII N", UNUSED, "remove it"),
    rows("internal", "RRRR N", "has been removed from Determined", "remove it"),
)
