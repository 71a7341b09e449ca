"""What a session refuses: arguments of its methods, and calls that come too early."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import deepspeed

from determined_ds.config.resolve import ResolvedConfig
from determined_ds.errors import ConfigError, Problem
from determined_ds.sessions.taking import Drive
from determined_ds.train.adoption import MADE
from determined_ds.train.data.passes import has_state
from determined_ds.trial.author import described


def refused(key: str, message: str, fix: str, code: str = "session") -> ConfigError:
    """The error of a call; ``key`` names it as the script writes it."""
    return ConfigError(Problem(key=key, message=message, fix=fix, code=code))


def decided(context: Any, key: str) -> ResolvedConfig:
    """What was decided.

    Args:
        context: Of the session.
        key: The property, as the script writes it.

    Raises:
        ConfigError: the batch is not known yet; names what a script can do.
    """
    try:
        return context.resolved  # type: ignore[no-any-return]
    except ConfigError as error:
        missing = [problem for problem in error.problems if problem.code != "undecided"]
        message = "is not known before the first engine, since the configuration leaves the batch open"
        fix = "state hyperparameters.global_batch_size, or call s.checkpoint(engine) first"
        raise ConfigError([*missing, Problem(key=key, message=message, fix=fix, code="undecided")]) from None


def driven(what: str, drive: Drive | None, *, has_data: bool, is_pipeline: bool) -> Drive:
    """What is driven.

    Args:
        what: What the script does, as messages say it.
        drive: What is driven; None before an engine was handed over.
        has_data: The session has a training loader.
        is_pipeline: Its engine is a pipeline.

    Raises:
        ConfigError: something has to come before the call.
    """
    if drive is None:
        fix = "call s.checkpoint(engine) after deepspeed.initialize"
        raise refused(what, "no engine was handed over yet", fix)
    if what in ("s.steps", "s.epochs") and not has_data:
        raise refused(what, "there is no training data", "call loader = s.loader(dataset) before")
    if what == "iterating the loader" and is_pipeline:
        fix = "write: for batches in s.steps(): engine.train_batch(data_iter=batches)"
        raise refused(what, "a pipeline takes its batches itself", fix)
    return drive


@contextlib.contextmanager
def of_script() -> Iterator[None]:
    """Within, an engine that contradicts the hyperparameters is refused in words of a script."""
    words = {MADE: "the engine of s.checkpoint", "context.overwrite(...)": "config=s.ds_config"}
    try:
        yield
    except ConfigError as error:
        problems = list(error.problems)
        for of_trial, said in words.items():
            problems = [
                replace(
                    each,
                    message=each.message.replace(of_trial, said),
                    fix=each.fix and each.fix.replace(of_trial, said),
                )
                for each in problems
            ]
        raise ConfigError(problems) from None


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
