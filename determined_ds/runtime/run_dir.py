"""What lies in a run directory, by name."""

EXPERIMENT = "experiment.yaml"  # what was really run
DEEPSPEED_CONFIG = "deepspeed_config.json"  # what DeepSpeed was really given
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
TENSORBOARD = "tensorboard"
LOGS = "logs"  # what the ranks but the first write
