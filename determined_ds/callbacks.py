"""Callbacks for ``build_callbacks``: Determined's, with what the loop of this library calls besides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from determined import pytorch

from determined_ds.errors import ConfigError, Problem
from determined_ds.trial.own_parts import OwnParts


class Callback(pytorch.PyTorchCallback):
    """Determined's ``PyTorchCallback`` with three more methods. Under Determined's own loop they are not called."""

    def attach(self, engines: Sequence[Any]) -> None:
        """Called once, before a checkpoint is loaded and anything is trained.

        Args:
            engines: The trial's engines.
        """

    def on_step_end(self, batch_idx: int, metrics: Mapping[str, Any]) -> None:
        """Called after each optimizer step, as the trial's method of this name.

        Args:
            batch_idx: The step just taken, from 0.
            metrics: Its metrics on this rank, on the device.
        """

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """Entered around each validation and prediction, by all ranks; left also where they fail."""
        yield


class EMA(Callback):
    """An exponential moving average of the weights, used for validation and prediction.

    After each optimizer step ``average = decay * average + (1 - decay) * weights``, in fp32, of all parameters that
    require a gradient. Each replica averages its own part (4 bytes a parameter, divided by the replicas): under ZeRO 3
    the partition that it holds, so nothing is gathered. A validation exchanges the parts, and takes a second copy of
    the weights (of this rank's partition under ZeRO 3). The average is of the weights that the model computes with: in
    bf16 training, of the bf16 weights. Buffers, such as a batch norm's statistics, are not averaged.

    It begins with the weights that training begins with. Checkpoints hold it, and a run resumes with it; training and
    the weights in a checkpoint stay as they would be without it.

    Args:
        decay: 0 to 1, both excluded; e.g. 0.999.
        from_step: Optimizer steps after which averaging begins; until then the average is the weights.
    """

    def __init__(self, decay: float = 0.999, *, from_step: int = 0) -> None:
        if isinstance(decay, bool) or not isinstance(decay, (int, float)) or not 0 < decay < 1:
            message, fix = "must be between 0 and 1 (exclusive)", "write e.g. EMA(0.999)"
            raise ConfigError(Problem(key="EMA.decay", value=decay, message=message, fix=fix, code="ema"))
        self.decay = float(decay)
        self.from_step = from_step
        self._engines: list[OwnParts] = []
        self._averages: list[list[torch.Tensor]] = []

    def attach(self, engines: Sequence[Any]) -> None:
        self._engines = [OwnParts(engine) for engine in engines]

    def on_training_start(self) -> None:
        """Begin with the weights, unless a checkpoint was loaded.

        Raises:
            ConfigError: Determined's own loop trains, which would not average.
        """
        if not self._engines:
            message, fix = "has no effect under Determined's own Trainer", "train by determined_ds.Trainer"
            raise ConfigError(Problem(key="EMA", message=message, fix=fix, code="own-loop"))
        if not self._averages:
            self.begin()

    @torch.no_grad()
    def on_step_end(self, batch_idx: int, metrics: Mapping[str, Any]) -> None:
        """Average the weights of this step."""
        weight = 1 - self.decay if batch_idx >= self.from_step else 1.0
        for engine, averages in zip(self._engines, self._averages, strict=True):
            pairs = [pair for pair in zip(averages, engine.values(), strict=True) if pair[0].numel()]
            if pairs:
                own, now = (list(column) for column in zip(*pairs, strict=True))
                torch._foreach_lerp_(own, [value.to(own[0]) for value in now], weight)

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """In here the engines compute with the average."""
        with contextlib.ExitStack() as stack:
            for engine, averages in zip(self._engines, self._averages, strict=False):
                stack.enter_context(engine.replaced_by(averages))
            yield

    # ------------------------------------------------------------------------------------------ checkpoints

    def begin(self) -> None:
        """Begin with the weights as they are now."""
        self._averages = [
            [value.detach().to(torch.float32, copy=True) for value in engine.values()]
            for engine in self._engines
        ]

    def parts(self, number: int) -> list[tuple[Any, int, torch.Tensor]]:
        """What this rank averages of an engine; a checkpoint holds it as a state of each parameter.

        Args:
            number: Of the engine, from 0.

        Returns:
            Each parameter, the place of the first element in the flattened parameter, and the average, not copied;
            none before training has begun.
        """
        if not self._averages:
            return []
        return list(zip(*self._engines[number].places(), self._averages[number], strict=True))
