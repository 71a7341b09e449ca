"""One row of the compatibility table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from determined_ds.config.facts import Facts
from determined_ds.documents.document import KeyPath

CONFIG = "deepspeed 0.19.8 runtime/config.py DeepSpeedConfig._do_error_check"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One row of the compatibility table.

    Args:
        code: Short stable name.
        key: The key that is named in the problem; the value and origin are looked up there. In the DeepSpeed JSON, or
            with ``hyperparameters`` before it.
        breaks: True where the rule is broken.
        message: What does not go together; ``{fact}`` is filled from :class:`Facts`.
        fix: What to write instead.
        source: Where upstream the rule comes from.
        warning: True where the run is possible but probably not intended.
    """

    code: str
    key: KeyPath
    breaks: Callable[[Facts], bool]
    message: str
    fix: str
    source: str
    warning: bool = False
