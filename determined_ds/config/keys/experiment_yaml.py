"""What happens to each key of an experiment YAML: under ``run``, on a cluster, under ``search``, and measured.

The four letters of a row are for these four places (see :class:`~determined_ds.config.keys.row.Row`). ``compare`` and
``autotune`` measure: they train some steps, validate and save nothing, and choose the strategy themselves.

Source: what a master of determined 0.38.1 and its agents do with a key is read from its schemas ``expconf/v0`` and its
documentation, what the harness does from its code: ``min_validation_period`` and its like are read for trials whose
entrypoint is a class (``determined/exec/harness.py``), and by no trial that a script starts, as all of ours are.
"""

from __future__ import annotations

from determined_ds.config.keys.row import ON_A_CLUSTER, rows, table_of
from determined_ds.task_log import LOG_POLICIES

NAMES = "only names things; kept in experiment.yaml"
OF_CLASSES = "Determined reads it only for entrypoints that name a class, and this one is a script"
UNUSED = "Determined 0.38.1 does nothing with it"
IN_JSON = "set it in the DeepSpeed JSON, and remove it"
FIT = "write hyperparameters.fit.{}"
MEASURED = "a measurement trains --warmup and --steps, and neither validates nor saves"

EXPERIMENT = table_of(
    # ---------------------------------------------------------------------------------------- what is trained
    rows("name", "HHHH", "names the run directory too"),
    rows("description labels workspace project", "HHHH", NAMES),
    rows("entrypoint", "HHHH", "says which trial to train; the launcher before it is the cluster's"),
    rows("data", "HHHH", "context.get_experiment_config() and get_data_config() give it to the trial"),
    rows("reproducibility", "HHHH", "seeds everything"),
    rows("debug", "HHHH", "more is logged"),
    rows("max_restarts", "HHHD", "a measurement that fails is a row that says so"),
    # -------------------------------------------------------------------------------------------- the searcher
    rows("searcher", "DHHD", "one point is taken, in the middle of the space, and named"),
    rows("searcher.{metric,smaller_is_better}", "HHHD", "a measurement goes by the speed"),
    rows("searcher.max_length", "IIII", OF_CLASSES, FIT.format("max_length")),
    rows("searcher.stop_once", "DIID", "every ASHA search of 0.38 stops trials early", "remove it", True),
    rows("searcher.source_checkpoint_uuid", "HHHI", "a measurement starts from the trial's own weights"),
    rows(
        "searcher.source_trial_id",
        "RHRI",
        "names a trial of a cluster",
        "give source_checkpoint_uuid a run directory or a checkpoint path",
    ),
    # ---------------------------------------------------------------------------- the library's hyperparameters
    rows("hyperparameters", "HHHH", "all others belong to the model"),
    rows("hyperparameters.global_batch_size", "HHHH", "every strategy trains the same batch"),
    rows("hyperparameters.{data_parallel_world_size,pipe_parallel_size}", "HHHD", "the strategy decides it"),
    rows("hyperparameters.model_parallel_size", "HHHH", "the trial's own mpu carries it out"),
    rows(
        "hyperparameters.{deepspeed_config,overwrite_deepspeed_args}",
        "HHHH",
        "see the DeepSpeed JSON's table; a strategy is laid over them",
    ),
    rows(
        "hyperparameters.{zero_stage,micro_batch_size}",
        "HHHD",
        "laid over the DeepSpeed JSON; a strategy decides it",
    ),
    rows("hyperparameters.trial_seed", "HHHH", "the trial's seed, instead of the one that a searcher draws"),
    rows("hyperparameters.{torch_compile,sdpa_kernel}", "HHHH", "autotune also tries others"),
    rows("hyperparameters.fit", "HHHD", MEASURED),
    rows("hyperparameters.fit.{max_length,validation_period,checkpoint_period}", "HHHD", MEASURED),
    rows("hyperparameters.fit.{reporting_period,checkpoint_policy}", "HHHD", MEASURED),
    rows("hyperparameters.fit.{step_zero_validation,save_total_limit}", "HHHD", MEASURED),
    rows(
        "hyperparameters.fit.warm_start",
        "HHHD",
        "says what is taken of searcher.source_checkpoint_uuid's checkpoint",
    ),
    rows("hyperparameters.fit.profiling_enabled", "HHHD", "nothing but the steps is measured"),
    rows("hyperparameters.fit.stop_on_nan", "HHHD", "a measurement always stops at NaN"),
    # ------------------------------------------------------------------------------- the machine and the container
    rows("resources", "IHII", ON_A_CLUSTER),
    rows("resources.slots_per_trial", "HHHH", "ranks to start; --slots replaces it"),
    rows("resources.max_slots", "IHHI", ON_A_CLUSTER),
    rows("resources.slots", "RRRR", "is for notebooks and commands", "write resources.slots_per_trial"),
    rows("resources.native_parallel", "IIII", UNUSED, "remove it"),
    rows(
        "resources.agent_label", "IIII", "Determined ignores it since 0.20", "write resources.resource_pool"
    ),
    rows("environment", "IHII", ON_A_CLUSTER),
    rows("environment.environment_variables", "HHHH", "set for the ranks"),
    rows("bind_mounts", "IHII", ON_A_CLUSTER),
    rows("slurm pbs", "IHII", ON_A_CLUSTER),
    rows("preemption_timeout retention_policy integrations", "IHII", ON_A_CLUSTER),
    # What these name is started once in a run here too.
    rows("log_policies", "IHII", ON_A_CLUSTER, default=list(LOG_POLICIES)),
    # ------------------------------------------------------------------------------------- what is kept and shown
    rows("checkpoint_storage", "IHII", ON_A_CLUSTER),
    rows(
        "checkpoint_storage.{checkpoint_path,tensorboard_path}",
        "IIII",
        "Determined ignores it",
        "write checkpoint_storage.storage_path",
    ),
    rows("profiling", "IIII", f"{UNUSED}, except for profiling.enabled", "remove it"),
    rows("profiling.enabled", "HHHI", "nothing but the steps is measured"),
    # -------------------------------------------------------------------------------- read for other kinds of trials
    rows("checkpoint_policy", "IIII", OF_CLASSES, FIT.format("checkpoint_policy"), "best"),
    rows("min_validation_period", "IIII", OF_CLASSES, FIT.format("validation_period")),
    rows("min_checkpoint_period", "IIII", OF_CLASSES, FIT.format("checkpoint_period")),
    rows("perform_initial_validation", "IIII", OF_CLASSES, FIT.format("step_zero_validation")),
    rows("scheduling_unit", "IIII", OF_CLASSES, FIT.format("reporting_period"), 100),
    rows("records_per_epoch", "IIII", OF_CLASSES, "write fit's lengths in epochs, which the data counts"),
    rows("optimizations", "IIII", OF_CLASSES, IN_JSON),
    rows(
        "optimizations.{average_training_metrics,average_aggregated_gradients}",
        "IIII",
        OF_CLASSES,
        IN_JSON,
        True,
    ),
    rows("optimizations.{aggregation_frequency,tensor_fusion_cycle_time}", "IIII", OF_CLASSES, IN_JSON, 1),
    rows("optimizations.tensor_fusion_threshold", "IIII", OF_CLASSES, IN_JSON, 64),
    rows("optimizations.mixed_precision", "IIII", OF_CLASSES, "enable bf16 in the DeepSpeed JSON", "O0"),
    rows("tensorboard_storage", "IIII", UNUSED, "remove it: checkpoint_storage is used"),
    rows("data_layer security", "IIII", UNUSED, "remove it"),
    rows("internal", "RRRR", "has been removed from Determined", "remove it"),
)
