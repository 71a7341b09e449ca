"""Arguments of a session's methods that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import deepspeed

from determined_ds.errors import ConfigError, Problem
from determined_ds.runtime.data.passes import has_state
from determined_ds.trial.author import described


def refused(key: str, message: str, fix: str, code: str = "session") -> ConfigError:
    """The error of a call; ``key`` names it as the script writes it."""
    return ConfigError(Problem(key=key, message=message, fix=fix, code=code))


def check_count(key: str, num: Any) -> None:
    """Refuse what is not a number of epochs or steps."""
    if isinstance(num, bool) or not isinstance(num, int) or num < 1:
        raise refused(key, f"got {described(num)}; expected an integer of at least 1", f"write {key}(10)")


def check_given(engines: tuple[Any, ...], state: Mapping[str, Any]) -> None:
    """Refuse what is not an engine, and objects without a state."""
    fix = "engine, *_ = deepspeed.initialize(...); s.checkpoint(engine)"
    if not engines:
        raise refused("s.checkpoint", "its first call was given no engine", fix)
    for engine in engines:
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise refused("s.checkpoint", f"got {described(engine)}; expected an engine of DeepSpeed", fix)
    for name, each in state.items():
        if not has_state(each):
            message = f"{name} is {described(each)}, which has no state_dict and load_state_dict"
            raise refused("s.checkpoint", message, "give it both, or leave it out")
