"""``determined_ds.deepspeed`` has the names of ``determined.pytorch.deepspeed``, with their arguments."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks


def compared() -> list[str]:
    """In a rank: what differs; methods of ours may take more, after theirs and by name."""
    from determined.pytorch import deepspeed as theirs

    from determined_ds import deepspeed as ours

    def differing(path: str, their: Any, our: Any) -> list[str]:
        found = []
        for name, value in vars(their).items():
            own = inspect.getattr_static(our, name, None)
            if name.startswith("_") or inspect.ismodule(value):
                continue
            if own is None:
                found.append(f"{path}{name} is missing")
            elif inspect.isclass(value) and not path:
                found += differing(f"{name}.", value, own)
            elif inspect.isfunction(value):
                wanted, given = arguments(value), arguments(own)
                if (given[: len(wanted)] if path else given) != wanted:
                    found.append(f"{path}{name}{inspect.signature(own)}")
        return found

    def arguments(function: Any) -> list[tuple[str, Any, Any]]:
        """Name, kind and default of each; of a ``TrainUnit``, its value."""
        found = inspect.signature(function).parameters.values()
        return [(each.name, each.kind, getattr(each.default, "value", each.default)) for each in found]

    return differing("", theirs, ours)


def test_every_name_takes_the_same_arguments(one_rank: Ranks) -> None:
    import determined_ds

    assert one_rank.run(compared) == [[]]
    assert "init" in determined_ds.__all__


BASE = {"train_batch_size": 16, "optimizer": {"type": "Adam", "params": {"lr": 0.1, "betas": [0.9, 0.99]}}}
OVER = {"train_micro_batch_size_per_gpu": 2, "optimizer": {"params": {"lr": 0.01, "betas": [0.5, 0.9]}}}


def overwritten(base: Any, over: dict[str, Any]) -> tuple[Any, Any]:
    """In a rank: what theirs and ours make of it."""
    from attrdict import AttrDict
    from determined.pytorch import deepspeed as theirs

    from determined_ds import deepspeed as ours

    found = ours.overwrite_deepspeed_config(base, AttrDict(over))
    assert type(found["optimizer"]) is dict
    with pytest.raises(TypeError, match="Expected string or dict for base_ds_config argument"):
        ours.overwrite_deepspeed_config([1, 2], {})  # type: ignore[arg-type]
    return theirs.overwrite_deepspeed_config(base, over), found


@pytest.mark.parametrize("by_path", [False, True])
def test_leaves_are_overwritten(one_rank: Ranks, by_path: bool, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps(BASE))
    base: Any = str(tmp_path / "ds.json") if by_path else BASE
    ((theirs, ours),) = one_rank.run(overwritten, base, OVER)
    assert ours == theirs
    assert ours["optimizer"]["params"] == {"lr": 0.01, "betas": [0.5, 0.9]}
