"""Which checkpoints are kept at the end of an experiment: those that a Determined master keeps."""

from __future__ import annotations

import json
import math
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.experiment.save_policy import SavePolicy
from determined_ds.protocol.checkpoint_files import Checkpoint
from determined_ds.protocol.kept_checkpoints import Rated, Validation, best_of, rated_in, spare
from determined_ds.protocol.run_dir import RunDir

# The semantics of the master's query, in a database with the same window functions: what it deletes.
SPECIFICATION = """
WITH ranked AS (
    SELECT checkpoints.uuid, validations.value AS value,
        RANK() OVER (ORDER BY validations.value * :sign NULLS LAST, validations.id NULLS LAST) AS of_all,
        RANK() OVER (PARTITION BY validations.trial
                     ORDER BY validations.value * :sign NULLS LAST, validations.id NULLS LAST) AS of_trial,
        RANK() OVER (PARTITION BY validations.trial ORDER BY checkpoints.steps DESC) AS latest
    FROM checkpoints LEFT JOIN validations
        ON validations.trial = checkpoints.trial AND validations.steps = checkpoints.steps
)
SELECT uuid FROM ranked
WHERE latest > :save_trial_latest
    AND (value IS NULL OR (of_all > :save_experiment_best AND of_trial > :save_trial_best))
"""

policies = st.builds(
    SavePolicy,
    save_experiment_best=st.integers(0, 4),
    save_trial_best=st.integers(0, 3),
    save_trial_latest=st.integers(0, 3),
)
places = st.tuples(st.integers(1, 3), st.integers(1, 6))  # trial, batch
values = st.one_of(st.none(), st.integers(-2, 2).map(float), st.sampled_from([math.inf, -math.inf]))


def rated(checkpoints: list[tuple[int, int]], validations: dict[tuple[int, int], Any]) -> list[Rated]:
    """Checkpoints by their numbers, at places that may have a validation; of those, the later the larger."""
    order = {
        place: Validation(value=value, order=(index,))
        for index, (place, value) in enumerate(validations.items())
    }
    return [
        Rated(
            checkpoint=Checkpoint(uuid=str(number), steps_completed=steps, path=Path()),
            trial=trial,
            validation=order.get((trial, steps)),
        )
        for number, (trial, steps) in enumerate(checkpoints, 1)
    ]


def names(found: list[Rated]) -> set[str]:
    return {each.checkpoint.uuid for each in found}


@given(
    checkpoints=st.lists(places, max_size=14),
    validations=st.dictionaries(places, values, max_size=14),
    policy=policies,
    smaller=st.booleans(),
)
def test_as_the_query_of_a_master(
    checkpoints: list[tuple[int, int]],
    validations: dict[tuple[int, int], Any],
    policy: SavePolicy,
    smaller: bool,
) -> None:
    """Ties, several checkpoints at a batch, validations without the metric, trials without validations."""
    database = sqlite3.connect(":memory:")
    database.execute("CREATE TABLE checkpoints (uuid TEXT, trial INT, steps INT)")
    database.execute("CREATE TABLE validations (id INT, trial INT, steps INT, value REAL)")
    for number, place in enumerate(checkpoints, 1):
        database.execute("INSERT INTO checkpoints VALUES (?, ?, ?)", (str(number), *place))
    for number, (place, value) in enumerate(validations.items()):
        database.execute("INSERT INTO validations VALUES (?, ?, ?, ?)", (number, *place, value))
    expected = database.execute(SPECIFICATION, {**vars(policy), "sign": 1 if smaller else -1})
    found = spare(rated(checkpoints, validations), policy, smaller_is_better=smaller)
    assert names(found) == {uuid for (uuid,) in expected}


# The example of Determined's documentation of checkpoint garbage collection.
DOCUMENTED = {1: [None, None, 0.6, 0.5, 0.4], 2: [None, 0.2, 0.3, None, None]}


@pytest.mark.parametrize(
    ("policy", "kept"),
    [
        ((0, 0, 0), ""),
        ((2, 0, 0), "8 7"),
        ((5, 0, 0), "8 7 5 4 3"),
        ((0, 1, 0), "7 5"),
        ((0, 3, 0), "8 7 5 4 3"),
        ((2, 1, 0), "8 7 5"),
        # Where it counts the latest, the documentation has 10 and 5: a master counts those without validation apart.
        ((0, 0, 1), "10 8 5"),
        ((0, 1, 1), "10 8 7 5"),
    ],
)
def test_as_documented(policy: tuple[int, int, int], kept: str) -> None:
    places = [(trial, batch) for trial, found in DOCUMENTED.items() for batch in range(1, len(found) + 1)]
    validations = {
        (trial, batch): value
        for trial, found in DOCUMENTED.items()
        for batch, value in enumerate(found, 1)
        if value is not None
    }
    all_of_them = rated(places, validations)
    limits = SavePolicy(
        save_experiment_best=policy[0], save_trial_best=policy[1], save_trial_latest=policy[2]
    )
    assert names(all_of_them) - names(spare(all_of_them, limits, smaller_is_better=True)) == set(kept.split())


@pytest.mark.parametrize("smaller", [True, False])
def test_nan_is_the_worst_value_and_better_than_none(smaller: bool) -> None:
    places = [(1, 1), (1, 2), (1, 3)]
    found = rated(places, {(1, 1): None, (1, 2): math.nan, (1, 3): 0.5})
    for kept, expected in ((1, {"1", "2"}), (2, {"1"}), (3, {"1"})):
        policy = SavePolicy(save_trial_best=kept, save_trial_latest=0)
        assert names(spare(found, policy, smaller_is_better=smaller)) == expected
    best = best_of(found, smaller_is_better=smaller)
    assert best is not None
    assert best.checkpoint.uuid == "3"
    assert best_of(found[:2], smaller_is_better=smaller) is None


def test_a_run_directory_as_it_is_read(tmp_path: Path) -> None:
    """The last of repeated validations counts; a folder that is no checkpoint is left alone."""
    there = RunDir(tmp_path)
    records = [("validation", 1, 9.0), ("validation", 2, "NaN"), ("training", 3, 0.0), ("validation", 1, 3.0)]
    lines = [
        {"group": g, "steps_completed": s, "metrics": {"loss": v}, "time": t}
        for t, (g, s, v) in enumerate(records)
    ]
    there.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for uuid, steps in (("a", 1), ("b", 2), ("c", 3), ("mine", None)):
        (there.checkpoints / uuid).mkdir(parents=True)
        if steps is not None:
            (there.checkpoints / uuid / "metadata.json").write_text(json.dumps({"steps_completed": steps}))
    found = {each.checkpoint.uuid: each.validation for each in rated_in(there, 7, metric="loss")}
    assert found.keys() == {"a", "b", "c"}
    assert found["a"] is not None
    assert (found["a"].value, found["c"]) == (3.0, None)
    assert found["b"] is not None
    assert math.isnan(found["b"].value or 0)
