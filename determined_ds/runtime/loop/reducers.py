"""The state of a trial's custom reducers, which outlives a validation and a checkpoint."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from determined_ds.runtime.checkpoints.saveable import copied_attributes


class Reducers:
    """All that ``context.wrap_reducer`` has wrapped, as one thing with a state.

    Args:
        context: The trial's context.
    """

    def __init__(self, context: Any) -> None:
        self._context = context

    def state_dict(self) -> list[dict[str, Any]]:
        """The attributes of every reducer, in the order in which they were wrapped."""
        reducers = [wrapped.reducer for wrapped in self._context._wrapped_reducers]
        return [copied_attributes(reducer, _attributes(reducer)) for reducer in reducers]

    def load_state_dict(self, state_dict: list[dict[str, Any]]) -> None:
        """Go on from :meth:`state_dict`."""
        for wrapped, state in zip(self._context._wrapped_reducers, state_dict, strict=False):
            vars(wrapped.reducer).update(copy.deepcopy(state))

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """They end with the values they began with."""
        state = self.state_dict()
        yield
        self.load_state_dict(state)


def _attributes(reducer: Any) -> dict[str, Any]:
    # ``fn`` is the function of a simple reducer: code, not state.
    return {name: value for name, value in vars(reducer).items() if name != "fn"}
