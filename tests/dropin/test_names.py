"""``determined_ds.deepspeed`` has the names of ``determined.pytorch.deepspeed``, with their arguments."""

from __future__ import annotations

import inspect
from typing import Any

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
