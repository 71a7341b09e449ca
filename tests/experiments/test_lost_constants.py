"""The web UI's search form loses constants that are 0, false or null: without them, a template is the same training.

Source: seen in the web UI of Determined 0.38.1, in what it posts.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds import ResolvedConfig
from tests.experiments.templates import RUN_HERE
from tests.harness.command import det_ds
from tests.package import CUDA, EXPERIMENTS, ROOT, experiment, records, resolved_of

SPEC_TYPES = {"const", "categorical", "int", "double", "log"}


def lost(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The constants that the form loses, at any depth."""
    for key, item in value.items():
        if isinstance(item, dict):
            if item.get("type") not in SPEC_TYPES:
                yield from lost(item, (*path, key))
        elif item is None or item is False or (item == 0 and type(item) in (int, float)):
            yield (*path, key)


def without(config: dict[str, Any], paths: list[tuple[str, ...]]) -> dict[str, Any]:
    lean = copy.deepcopy(config)
    for path in paths:
        section = lean["hyperparameters"]
        for step in path[:-1]:
            section = section[step]
        del section[path[-1]]
    return lean


def resolved(config: dict[str, Any]) -> ResolvedConfig:
    return resolved_of(experiment(config), CUDA)


CONFIGS = {f"{path.parent.name}-{path.stem}": yaml.safe_load(path.read_text()) for path in EXPERIMENTS}
CONSTANTS = [
    pytest.param(name, path, id=f"{name}-{'.'.join(path)}")
    for name, config in CONFIGS.items()
    for path in lost(config["hyperparameters"])
]


@pytest.mark.parametrize(("name", "constant"), CONSTANTS)
def test_without_it_deepspeed_is_given_the_same(name: str, constant: tuple[str, ...]) -> None:
    with_it, without_it = resolved(CONFIGS[name]), resolved(without(CONFIGS[name], [constant]))
    assert without_it.ds_config == with_it.ds_config
    # All but what says where a value came from: a line of a file, or not.
    origins = {each: getattr(with_it, each) for each in ("ds", "stated", "hyperparameters", "warnings")}
    assert without_it.stated.data == with_it.stated.data
    assert dataclasses.replace(without_it, **origins) == with_it
    assert [each.message for each in without_it.warnings] == [each.message for each in with_it.warnings]


@pytest.mark.parametrize("path", [path for path in RUN_HERE if path.endswith("/const.yaml")])
def test_without_any_of_them_it_trains_the_same(tmp_path: Path, path: str) -> None:
    whole = yaml.safe_load((ROOT / path).read_text())
    losses = []
    for name, config in (("whole", whole), ("lean", without(whole, list(lost(whole["hyperparameters"]))))):
        (tmp_path / f"{name}.yaml").write_text(yaml.safe_dump(config))
        done = det_ds("run", tmp_path / f"{name}.yaml", ".", "--test", "--run-dir", tmp_path / name)
        assert done.returncode == 0, done.stderr
        reported = [metrics for _, metrics in records(tmp_path / name, "validation")]
        losses.append([value for each in reported for key, value in each.items() if key.endswith("loss")])
    assert losses[0] == losses[1] != []
