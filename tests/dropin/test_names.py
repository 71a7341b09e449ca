"""``determined_ds.deepspeed`` has the names of ``determined.pytorch.deepspeed``, with their arguments."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks


def public(found: Any) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(found).items()
        if not name.startswith("_") and not inspect.ismodule(value)
    }


def arguments(function: Any) -> list[tuple[str, Any, Any]]:
    """Name, kind and default of each; of a ``TrainUnit``, its value."""
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, getattr(each.default, "value", each.default)) for each in found]


def compared() -> list[str]:
    """In a rank: what differs."""
    from determined.pytorch import deepspeed as theirs

    from determined_ds import deepspeed as ours

    differing = []
    for name, value in public(theirs).items():
        own = getattr(ours, name, None)
        if own is None:
            differing.append(f"{name} is missing")
        elif inspect.isfunction(value) and arguments(own) != arguments(value):
            differing.append(f"{name}{inspect.signature(own)}")
        elif inspect.isclass(value):
            differing += _methods(name, value, own)
    return differing


def _methods(name: str, theirs: Any, ours: Any) -> list[str]:
    differing = []
    for method, value in public(theirs).items():
        own = inspect.getattr_static(ours, method, None)
        if own is None:
            differing.append(f"{name}.{method} is missing")
        elif inspect.isfunction(value):
            # Ours may take more, after theirs and by name.
            shared = arguments(own)[: len(arguments(value))]
            if shared != arguments(value):
                differing.append(f"{name}.{method}{inspect.signature(own)}")
    return differing


def test_every_name_takes_the_same_arguments(one_rank: Ranks) -> None:
    assert one_rank.run(compared) == [[]]


def test_init_is_a_name_of_the_package() -> None:
    import determined_ds

    assert "init" in determined_ds.__all__


def overwritten(base: Any, over: dict[str, Any]) -> tuple[Any, Any]:
    """In a rank: what theirs and ours make of it."""
    from attrdict import AttrDict
    from determined.pytorch import deepspeed as theirs

    from determined_ds import deepspeed as ours

    found = ours.overwrite_deepspeed_config(base, AttrDict(over))
    assert type(found["optimizer"]) is dict
    return theirs.overwrite_deepspeed_config(base, over), found


BASE = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
OVER = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"params": {"lr": 0.01, "betas": [0.5, 0.9]}}}


@pytest.mark.parametrize("by_path", [False, True])
def test_leaves_are_overwritten(one_rank: Ranks, by_path: bool, tmp_path: Path) -> None:
    base: Any = BASE
    if by_path:
        base = str(tmp_path / "ds.json")
        Path(base).write_text(json.dumps(BASE))
    ((theirs, ours),) = one_rank.run(overwritten, base, OVER)
    assert ours == theirs
    assert ours["optimizer"]["params"] == {"lr": 0.01, "betas": [0.5, 0.9]}


def test_neither_a_path_nor_a_mapping() -> None:
    from determined_ds.deepspeed import overwrite_deepspeed_config

    wrong: Any = [1, 2]
    with pytest.raises(TypeError, match="Expected string or dict for base_ds_config argument"):
        overwrite_deepspeed_config(wrong, {})
