"""What ``det-ds bench`` asks of its ranks: the same on each, as JSON on their command line. Loads no torch."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

from determined_ds.protocol.machine_figures import COLLECTIVES


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What to measure.

    Args:
        bench: The kind: ``communication``, ``memory``, ``training`` or ``checkpoint``.
        accelerator: ``cpu`` or ``cuda``.
        seconds: How long it may take, once the ranks have met.
        command: As it was typed.
        collectives: Of ``communication``: which.
        dtype: Of ``communication``: of the elements, torch's name.
        largest_bytes: Of ``communication``: the largest size.
        models: Of ``memory`` and ``training``: ``LAYERSxWIDTH``.
        precision: Of the same: ``fp32``, ``bf16`` or ``fp16``.
        strategies: Of the same: ``zero0`` ... ``zero3_offload``; of ``training`` the first alone.
        micro_batches: Of ``training``: samples of a rank.
        storage: Of ``checkpoint``: whether the experiment's ``checkpoint_storage`` is measured.
    """

    bench: str
    accelerator: str
    seconds: float
    command: str = ""
    collectives: tuple[str, ...] = COLLECTIVES
    dtype: str = "float32"
    largest_bytes: int = 0
    models: tuple[str, ...] = ()
    precision: str = "fp32"
    strategies: tuple[str, ...] = ()
    micro_batches: tuple[int, ...] = ()
    storage: bool = False

    def to_text(self) -> str:
        """As a word of a command line."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_text(cls, text: str) -> BenchRequest:
        """What :meth:`to_text` wrote."""
        given = json.loads(text)
        fields: dict[str, Any] = {
            name: tuple(each) if isinstance(each, list) else each for name, each in given.items()
        }
        return cls(**fields)
