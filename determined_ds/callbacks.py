"""Callbacks for ``build_callbacks``: Determined's, with what the loop of this library calls besides."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from determined import pytorch

from determined_ds.errors import CheckpointError, ConfigError, Problem
from determined_ds.trial.own_parts import OwnParts, merge_parts


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

    # A subclass may also define load_whole(states): called instead of load_state_dict where other ranks wrote the
    # checkpoint, with what state_dict returned on each of them, by rank. Without it the state of one rank is taken.


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
            self._averages = [_copied(engine.values()) for engine in self._engines]

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

    def state_dict(self) -> dict[str, Any]:
        """This replica's parts."""
        return {
            "engines": [
                {
                    "replica": engine.replica,
                    "replicas": engine.replicas,
                    "shapes": {name: list(shape) for name, shape in engine.shapes.items()},
                    "parts": dict(zip(engine.shapes, averages, strict=True)),
                }
                for engine, averages in zip(self._engines, self._averages, strict=False)
            ]
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`, written by as many replicas.

        Raises:
            CheckpointError: by another number, or of other parameters.
        """
        states = state_dict["engines"]
        if not states:
            return  # it was written before training began
        self._averages = []
        for engine, state in zip(self._engines, states, strict=True):
            values = engine.values()
            parts = [state["parts"].get(name) for name in engine.shapes]
            sizes = [None if part is None else part.numel() for part in parts]
            if state["replicas"] != engine.replicas or sizes != [value.numel() for value in values]:
                raise CheckpointError(
                    f"the average in the checkpoint is of {state['replicas']} replicas, or of other parameters\n"
                    "  fix: resume with the slots, the ZeRO stage and the model that wrote it"
                )
            self._averages.append(
                [part.to(value.device) for part, value in zip(parts, values, strict=True) if part is not None]
            )

    def load_whole(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Take over the average that other ranks have written, in any number.

        Args:
            states: What :meth:`state_dict` returned on each of them.

        Raises:
            CheckpointError: it is of other parameters.
        """
        states = [state for state in states if state["engines"]]
        if not states:
            return  # they were written before training began
        self._averages = []
        for index, engine in enumerate(self._engines):
            whole = merge_parts([state["engines"][index] for state in states])
            found = {name: tuple(tensor.shape) for name, tensor in whole.items() if name in engine.shapes}
            if found != engine.shapes:
                raise CheckpointError("the average in the checkpoint is of another model")
            self._averages.append(
                [
                    engine.part_of(whole[name])[: value.numel()].to(value.device, torch.float32, copy=True)
                    for name, value in zip(engine.shapes, engine.values(), strict=True)
                ]
            )


def _copied(values: list[torch.Tensor]) -> list[torch.Tensor]:
    return [value.detach().to(torch.float32, copy=True) for value in values]
