"""What lies in a run directory, by name."""

from __future__ import annotations

from pathlib import Path

EXPERIMENT = "experiment.yaml"  # what was really run
DEEPSPEED_CONFIG = "deepspeed_config.json"  # what DeepSpeed was really given
METRICS = "metrics.jsonl"
RESULT = "result.json"  # how it ended
CHECKPOINTS = "checkpoints"
SYSTEM_METRICS = "system_metrics.jsonl"  # of a run that is profiled
TENSORBOARD = "tensorboard"
LOGS = "logs"  # what the ranks but the first write
REPORTED = "master.json"  # of a run that is reported to a master: how that knows it
MEASURED = "measured.json"  # of a run that is measured
OUTPUT = "output.log"  # of a run that another process started
GIVEN = "given.yaml"  # what that process asked for
STEP_GROUP = "measured"  # of the records in metrics.jsonl that it writes, one a step


def short(path: Path) -> str:
    """A path as people would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
