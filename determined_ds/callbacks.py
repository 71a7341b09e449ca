"""What a trial's ``build_callbacks`` returns, and a callback for it: an average of the weights."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from determined import pytorch

from determined_ds.trial import returned
from determined_ds.trial.divided import degree_of, expert_degree_of
from determined_ds.trial.returned import method_of, refused

logger = logging.getLogger("determined_ds")


class _OwnParts:
    """The trained parameters of an engine, of which each replica has its own part; other weights in their place.

    Under ZeRO 3 a rank has nothing else. Otherwise every replica has whole parameters: they are cut in the same way, so
    each replica handles its own part, and a validation puts the parts together.

    Source: ``partition_parameters.py`` and ``stage3.py`` (``step``, ``_post_step``) in deepspeed 0.19.8's
    ``runtime/zero``.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.parameters: list[Any] = [each for each in engine.module.parameters() if each.requires_grad]
        self._is_split = any(hasattr(parameter, "ds_tensor") for parameter in self.parameters)
        self._group = getattr(engine, "seq_data_parallel_group", None)
        offload, is_copied = None, False
        if self._is_split:
            offload, self._group = (
                engine._config.zero_config.offload_param,
                self.parameters[0].ds_process_group,
            )
            is_copied = any(
                getattr(each, "ds_secondary_tensor", None) is not None
                or not each.ds_tensor.is_floating_point()
                for each in self.parameters
            )
        for lacks, what in (
            (degree_of(engine) > 1, "weights that tensor-parallel ranks cut"),
            (expert_degree_of(engine) > 1, "experts that ranks share"),
            (offload is not None and offload.device == "nvme", "weights on NVMe"),
            (is_copied, "weights that are quantized, or have a copy by zero_hpz_partition_size,"),
        ):
            if lacks:
                raise refused("EMA", f"an average of {what} is not supported", "leave EMA out", "ema")
        alone = not dist.is_initialized()
        self._replicas = 1 if alone else dist.get_world_size(self._group)
        replica = 0 if alone else dist.get_rank(self._group)
        # Numbers in a part, of which the last replicas may have fewer; where this replica's part begins.
        self._sizes = [
            int(each.ds_tensor.numel() if self._is_split else -(-each.numel() // self._replicas))
            for each in self.parameters
        ]
        self.starts = [replica * size for size in self._sizes]

    def values(self) -> list[torch.Tensor]:
        """This replica's part of each parameter as it is now, not copied, one-dimensional; it may be empty."""
        return [
            each.ds_tensor.data[: max(0, each.ds_numel - start)]
            if self._is_split
            else each.data.reshape(-1)[start : start + size]
            for each, start, size in zip(self.parameters, self.starts, self._sizes, strict=True)
        ]

    @contextlib.contextmanager
    def replaced_by(self, parts: list[torch.Tensor]) -> Iterator[None]:
        """In here the engine computes with other weights, of which ``parts`` are this replica's; a collective."""
        if self._is_split:
            before = [parameter.ds_tensor.data.clone() for parameter in self.parameters]
            self._write(parts)
        else:
            before = [parameter.data for parameter in self.parameters]
            for parameter, size, part in zip(self.parameters, self._sizes, parts, strict=True):
                own = torch.nn.functional.pad(part.to(parameter.dtype), (0, size - part.numel()))
                rows = (
                    [own] if self._replicas == 1 else [torch.empty_like(own) for _ in range(self._replicas)]
                )
                if self._replicas > 1:
                    dist.all_gather(rows, own, group=self._group)
                parameter.data = torch.cat(rows)[: parameter.numel()].view(parameter.shape)
        try:
            yield
        finally:
            if self._is_split:
                self._write(before)
            else:
                for parameter, whole in zip(self.parameters, before, strict=True):
                    parameter.data = whole

    @torch.no_grad()
    def _write(self, parts: list[torch.Tensor]) -> None:
        """Write this rank's partitions, as a step of ZeRO 3 does.

        Parameters that were used last may still be whole, and would be used again as they are: all are released, and
        those that ZeRO keeps whole are gathered again.
        """
        optimizer = self._engine.optimizer
        optimizer.parameter_offload.partition_all_parameters()
        for parameter, part in zip(self.parameters, parts, strict=True):
            parameter.ds_tensor.data[: part.numel()].copy_(part)
        if persistent := optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)


class EMA(pytorch.PyTorchCallback):  # type: ignore[misc]
    """An exponential moving average of the weights, used for validation.

    After each optimizer step ``average = decay * average + (1 - decay) * weights``, in fp32, of all parameters that
    require a gradient. Each replica averages its own part (4 bytes a parameter, divided by the replicas): under ZeRO 3
    the partition that it holds, so nothing is gathered. A validation exchanges the parts, and takes a second copy of
    the weights (of this rank's partition under ZeRO 3). The average is of the weights that the model computes with: in
    bf16 training, of the bf16 weights. Buffers, such as a batch norm's statistics, are not averaged.

    It begins with the weights that training begins with. Checkpoints hold it, and a run resumes with it; training and
    the weights in a checkpoint stay as they would be without it.

    Args:
        decay: 0 to 1, both excluded; e.g. 0.999.
    """

    def __init__(self, decay: float = 0.999) -> None:
        if not isinstance(decay, float) or not 0 < decay < 1:
            message, fix = "must be between 0 and 1 (exclusive)", "write e.g. EMA(0.999)"
            raise refused("EMA.decay", message, fix, "ema", value=decay)
        self.decay = decay
        self._engines: list[_OwnParts] = []
        self._averages: list[list[torch.Tensor]] = []

    def attach(self, engines: Sequence[Any]) -> None:
        """Average these engines; before a checkpoint is loaded."""
        self._engines = [_OwnParts(engine) for engine in engines]

    def on_training_start(self) -> None:
        """Begin with the weights, unless a checkpoint was loaded.

        Raises:
            ConfigError: Determined's own loop trains, which would not average.
        """
        if not self._engines:
            message, fix = "has no effect under Determined's own Trainer", "train by determined_ds.Trainer"
            raise refused("EMA", message, fix, "own-loop")
        if not self._averages:
            self.begin()

    @torch.no_grad()
    def on_step_end(self, batch_idx: int, metrics: Mapping[str, Any]) -> None:
        """Average the weights of this step."""
        for engine, averages in zip(self._engines, self._averages, strict=True):
            pairs = [pair for pair in zip(averages, engine.values(), strict=True) if pair[0].numel()]
            if pairs:
                own, now = (list(column) for column in zip(*pairs, strict=True))
                torch._foreach_lerp_(own, [value.to(own[0]) for value in now], 1 - self.decay)

    @contextlib.contextmanager
    def validating(self) -> Iterator[None]:
        """In here the engines compute with the average; for all ranks."""
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
        own = self._engines[number]
        return list(zip(own.parameters, own.starts, self._averages[number], strict=True))


def built_callbacks(trial: Any, context: Any) -> dict[str, Any]:
    """What a trial's ``build_callbacks`` returns; an ``EMA`` averages its engines."""
    fix = "call super().__init__(context) first" if hasattr(trial, "build_model") else "call it on the engine"
    called = "context.wrap_model_engine(engine)"
    returned.check(bool(context.models), trial, "__init__", None, called, fix, "wrapped no engine")
    found, kind = trial.build_callbacks(), pytorch.PyTorchCallback
    are_right = isinstance(found, dict) and all(isinstance(each, kind) for each in found.values())
    fix = 'return {"mine": MyCallback()}; the name is that of its state in a checkpoint'
    expected = "a dict of names and PyTorchCallback objects"
    returned.check(are_right, trial, "build_callbacks", found, expected, fix)
    hooks = {"on_step_end", *dir(kind)}
    for callback in found.values():
        if isinstance(callback, EMA):
            callback.attach(context.models)
        for name in dir(callback) if context.distributed.rank == 0 else ():
            if name.startswith("on_") and name not in hooks:
                where = method_of(callback, name)
                logger.warning("warning: %s is not a hook of PyTorchCallback, and is never called", where)
    return dict(found)
