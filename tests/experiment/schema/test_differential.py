"""Our verdict of a config is the master's, by its own schemas and code, on thousands that were made for it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.experiment.schema.making import Maker, damaged, paths_in
from tests.harness.master_schemas import incomplete, insane, refused_by_code
from tests.package import schema_problems

Json = Any
NUM_CONFIGS = 10 * settings().max_examples
BASE = {"entrypoint": "python3 train.py", "searcher": {"name": "single", "metric": "loss"}}
# What a cluster may have as its checkpoint_storage: complete, of each type.
CLUSTERS: list[dict[str, Json]] = [
    {"type": "shared_fs", "host_path": "/"},
    {"type": "directory", "container_path": "/data"},
    {"type": "s3", "bucket": "b"},
    {"type": "gcs", "bucket": "b"},
    {"type": "azure", "container": "c", "account_url": "u"},
]


def refused_by_the_master(config: dict[str, Json]) -> bool:
    """On the cluster that suits the config best."""
    if any(insane(config)) or any(refused_by_code(config)):
        return True
    kind = (config.get("checkpoint_storage") or CLUSTERS[0]).get("type")
    clusters = [cluster for cluster in CLUSTERS if kind in (None, cluster["type"])]
    return all(any(incomplete(config, cluster)) for cluster in clusters)


def agree(config: dict[str, Json]) -> bool:
    """Whether the config is refused; we and the master must be of one mind."""
    errors, warnings = schema_problems(config)
    refused = refused_by_the_master(config)
    assert bool(errors) == refused, errors
    keys = {"", *(".".join(map(str, path)) for path in paths_in(config))}
    for problem in (*errors, *warnings):
        assert problem.message
        assert problem.fix
        assert problem.origin == "const.yaml"
        assert {problem.key, problem.key.rpartition(".")[0]} & keys, problem
    return refused


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
            config = damaged(config, choices)
        verdicts[agree(config)] += 1

    check()
    assert min(verdicts[True], verdicts[False]) > NUM_CONFIGS * 0.3, verdicts


SCALARS = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(-1e9, 1e9) | st.text(max_size=3)
)
KEYS = st.sampled_from(["type", "name", "int", "nested", "a", "slots"])
SECTIONS = st.sampled_from(["entrypoint", "searcher", "hyperparameters", "resources", "a", "labels", "data"])
ANYTHING = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(SECTIONS, ANYTHING))
def test_whatever_stands_in_a_section_is_judged(config: dict[str, Json]) -> None:
    agree(BASE | config)
