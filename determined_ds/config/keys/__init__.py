"""What happens to each key that a user may write: honoured, refused, decided by the command, or ignored with a warning.

``experiment.py`` is the table of the experiment YAML and of the library's hyperparameters, ``deepspeed.py`` that of the
DeepSpeed JSON. ``tests/config/keys`` enumerates every known key and finds none without a row.
"""

from __future__ import annotations

from determined_ds.config.keys.row import CLUSTER, MEASURE, RUN, SEARCH
from determined_ds.config.keys.told import ignored_by_ddp, json_problems, not_looked_at

__all__ = ["CLUSTER", "MEASURE", "RUN", "SEARCH", "ignored_by_ddp", "json_problems", "not_looked_at"]
