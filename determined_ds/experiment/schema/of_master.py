"""Determined's own schemas of an experiment configuration, and what its code adds to them.

The files in ``expconf/v0`` are Determined's, unchanged. What differs from them is in ``EDITS``: what the master refuses
in its code, and what it completes before it asks for it.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from determined_ds.documents.document import get_path
from determined_ds.experiment.additions import added_to
from determined_ds.experiment.experiment import LARGEST_SEED, SEARCHERS

Json = Any

FOLDER = Path(__file__).with_name("expconf") / "v0"
STORAGES = ("shared_fs", "directory", "s3", "gcs", "azure")
ASHA_NEEDS = ["max_trials", "metric", "max_time", "time_metric"]

# File -> {place in it -> what is there in fact}. Source: the Go structs that the schemas are read into in
# determined 0.38.1's ``master/pkg/schemas/expconf``, and ``master/internal/core_experiment.go``.
EDITS: dict[str, dict[str, Json]] = {
    # The master names the experiment, and fills the others; what a grid needs is judged in problems.py.
    "experiment": {"eventuallyRequired": ["entrypoint", "searcher"], "allOf": []},
    "environment": {"eventuallyRequired": []},
    "environment-image-map": {"eventuallyRequired": []},
    "reproducibility": {"eventuallyRequired": [], "properties.experiment_seed.maximum": LARGEST_SEED},
    # The schema takes "8g"; the struct does not. `slots` is for notebooks and commands.
    "resources": {
        "properties.shm_size.type": ["integer", "null"],
        "properties.slots": {"type": "null"},
    },
    "devices": {"items.union.items.1.pattern": "^/[^:]*:/[^:]*(:[^:]*)?$"},
    "azure": {"checks": {}},  # its credentials are judged in problems.py
    "searcher-adaptive-asha": {"eventuallyRequired": ASHA_NEEDS},
    "searcher-async-halving": {"eventuallyRequired": [*ASHA_NEEDS, "num_rungs"]},
    "searcher": {
        "then.union.items": [
            {"unionKey": f"const:name={name}", "$ref": f"searcher-{name}"} for name in SEARCHERS
        ]
    },
}


@cache
def schema(name: str) -> dict[str, Json]:
    """A schema by its address, or by the name of what it describes."""
    name = name.rpartition("/")[2].removesuffix(".json").replace("_", "-")
    found: dict[str, Json] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    for place, value in EDITS.get(name, {}).items():
        *above, key = (int(step) if step.isdigit() else step for step in place.split("."))
        get_path(found, tuple(above))[key] = value
    for key, row in added_to(name).items():
        found["properties"][key] = {"enum": [None, *row.values]}
    return found


def keys_of(*names: str) -> frozenset[str]:
    """The keys that the schemas of these names know."""
    return frozenset(key for name in names for key in schema(name)["properties"])
