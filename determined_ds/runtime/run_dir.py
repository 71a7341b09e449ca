"""What lies in a run directory, by name."""

EXPERIMENT = "experiment.yaml"  # what was really run
DEEPSPEED_CONFIG = "deepspeed_config.json"  # what DeepSpeed was really given
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOGS = "logs"  # what the ranks but the first write
MEASURED = "measured.json"  # of a run that is measured
OUTPUT = "output.log"  # of a run that another process started
GIVEN = "given.yaml"  # what that process asked for
STEP_GROUP = "measured"  # of the records in metrics.jsonl that it writes, one a step
