"""Our verdict of a config is the master's: on thousands that were made for it, and on the oracle's own cases."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from determined_ds.documents.document import Document, get_path
from determined_ds.experiment.schema import experiment_problems
from tests.experiment.schema.making import Maker
from tests.experiment.schema.master import CLUSTERS, refusals, slow_refusals
from tests.experiments.test_master_schemas import CASES

Json = Any
NUM_CONFIGS = 10 * settings().max_examples
BASE = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}


def agree(config: dict[str, Json]) -> bool:
    """Whether the config is refused; we and the master must be of one mind."""
    errors, warnings = experiment_problems(Document(name="a.yaml", data=config))
    refused = list(refusals(config))
    assert bool(errors) == bool(refused), [*errors, *refused]
    for problem in (*errors, *warnings):
        assert problem.message
        assert problem.fix
        assert problem.origin == "a.yaml"
        steps = [int(step) if step.isdigit() else step for step in problem.key.split(".") if step]
        assert any(_stands(config, path) for path in (steps, steps[:-1])), problem
    return bool(refused)


def _stands(config: Json, path: list[Any]) -> bool:
    missing = object()
    return get_path(config, tuple(path), missing) is not missing


def test_the_verdict_is_the_masters() -> None:
    verdicts: Counter[bool] = Counter()

    @seed(38)
    @settings(max_examples=NUM_CONFIGS)
    @given(st.integers(0, 2**48))
    def check(number: int) -> None:
        choices = random.Random(number)
        maker = Maker(choices)
        config = maker.config() if number % 2 else maker.one_section()
        for _ in range(choices.choice([0, 0, 1, 1, 2, 3])):
            config = maker.spoilt(config)
        verdicts[agree(config)] += 1

    check()
    assert min(verdicts[True], verdicts[False]) > NUM_CONFIGS * 0.3, verdicts


def test_the_faster_oracle_is_the_oracle() -> None:
    for number in range(20):
        maker = Maker(random.Random(number))
        config = maker.config() if number % 2 else maker.spoilt(maker.config())
        storage = config.get("checkpoint_storage")
        kind = storage.get("type") if isinstance(storage, dict) else None
        verdicts = {
            bool(slow_refusals(config, cluster)) for cluster in CLUSTERS if kind in (None, cluster["type"])
        }
        assert any(refusals(config)) != (False in verdicts)


@given(
    st.dictionaries(
        st.sampled_from(["entrypoint", "searcher", "hyperparameters", "resources", "a", "labels", "data"]),
        st.recursive(
            st.none()
            | st.booleans()
            | st.integers(-(2**63), 2**64)
            | st.floats(-1e9, 1e9)
            | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(
                    st.sampled_from(["type", "name", "int", "nested", "a", "slots"]), inner, max_size=3
                )
            ),
            max_leaves=8,
        ),
    )
)
def test_nothing_raises(config: dict[str, Json]) -> None:
    agree(BASE | config)


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_the_cases_of_the_oracles_own_tests(case: dict[str, Json]) -> None:
    agree(case)
