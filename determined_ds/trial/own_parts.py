"""This rank's part of each parameter of an engine, under any ZeRO stage; other weights in their place for a while.

Under ZeRO 3 a rank has nothing else. Otherwise every replica has whole parameters: they are cut in the same way, so
each replica handles its own part, and a validation puts the parts together.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from determined_ds.errors import ConfigError, Problem
from determined_ds.trial.expert_parallel import expert_degree_of
from determined_ds.trial.tensor_parallel import degree_of

# Numbers that are exchanged at once.
BUCKET = 2**26


class OwnParts:
    """The trained parameters of an engine, of which each replica has its own part.

    Args:
        engine: DeepSpeed's, or a :class:`~determined_ds.trial.ddp.DDPEngine`.

    Raises:
        ConfigError: ZeRO keeps the parameters where they cannot be changed for a while; or ranks share layers or
            experts.

    Attributes:
        replica: This rank among those that hold the same parameters.
        replicas: How many there are.

    Source: ``partition_parameters.py`` and ``stage3.py`` (``step``, ``_post_step``) in deepspeed 0.19.8's
    ``runtime/zero``.
    """

    def __init__(self, engine: Any) -> None:
        for key, degree, what in (
            ("model_parallel_size", degree_of(engine), "weights that tensor-parallel ranks cut"),
            ("expert_parallel_size", expert_degree_of(engine), "experts that ranks share"),
        ):
            if degree > 1:
                message, fix = f"an average of {what} is not supported", "leave EMA out"
                key = f"hyperparameters.{key}"
                raise ConfigError(Problem(key=key, value=degree, message=message, fix=fix, code="own-parts"))
        self._engine = engine
        named = dict(engine.module.named_parameters())
        self._parameters = {name: parameter for name, parameter in named.items() if parameter.requires_grad}
        self._is_split = any(hasattr(parameter, "ds_tensor") for parameter in self._parameters.values())
        self._group = getattr(engine, "seq_data_parallel_group", None)
        if self._is_split:
            if message := self._unsupported():
                key, fix = "zero_optimization", "remove it from the DeepSpeed JSON, or leave EMA out"
                raise ConfigError(Problem(key=key, message=message, fix=fix, code="own-parts"))
            self._group = next(iter(self._parameters.values())).ds_process_group
        alone = not dist.is_initialized()
        self.replicas = 1 if alone else dist.get_world_size(self._group)
        self.replica = 0 if alone else dist.get_rank(self._group)

    def _unsupported(self) -> str:
        offload, parameters = self._engine._config.zero_config.offload_param, self._parameters.values()
        if offload is not None and offload.device == "nvme":
            return "parameters on NVMe (offload_param) cannot be averaged"
        if any(getattr(each, "ds_secondary_tensor", None) is not None for each in parameters):
            return (
                "zero_hpz_partition_size: a second copy of the weights on each machine would not be averaged"
            )
        if not all(each.ds_tensor.is_floating_point() for each in parameters):
            return "quantized weights (zero_quantized_weights) cannot be averaged"
        return ""

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """This replica's part of a whole tensor, one-dimensional; the last replicas' may be short, or empty."""
        size = -(-whole.numel() // self.replicas)
        return whole.reshape(-1)[self.replica * size : (self.replica + 1) * size]

    def places(self) -> tuple[list[Any], list[int]]:
        """The parameters, and where in each of them this replica's part begins."""
        parameters = list(self._parameters.values())
        sizes = [
            parameter.ds_tensor.numel() if self._is_split else -(-parameter.numel() // self.replicas)
            for parameter in parameters
        ]
        return parameters, [self.replica * size for size in sizes]

    def values(self) -> list[torch.Tensor]:
        """This replica's part of each parameter as it is now, not copied."""
        found = []
        with torch.no_grad():
            for parameter in self._parameters.values():
                if self._is_split:
                    size = parameter.ds_tensor.numel()
                    filled = max(0, min(size, parameter.ds_numel - self.replica * size))
                    found.append(parameter.ds_tensor.data[:filled])
                else:
                    found.append(self.part_of(parameter.data))
        return found

    @contextlib.contextmanager
    def replaced_by(self, parts: list[torch.Tensor]) -> Iterator[None]:
        """In here the engine computes with other weights; a collective at both ends.

        Args:
            parts: This replica's, as :meth:`values` lists them.
        """
        parameters = list(self._parameters.values())
        with torch.no_grad():
            if self._is_split:
                before = [parameter.ds_tensor.data.clone() for parameter in parameters]
                self._write_split(parts)
            else:
                before = [parameter.data for parameter in parameters]
                for parameter, whole in zip(parameters, self._wholes(parts), strict=True):
                    parameter.data = whole
        try:
            yield
        finally:
            with torch.no_grad():
                if self._is_split:
                    self._write_split(before)
                else:
                    for parameter, whole in zip(parameters, before, strict=True):
                        parameter.data = whole

    def _write_split(self, parts: list[torch.Tensor]) -> None:
        """Write this rank's partitions, as a step of ZeRO 3 does.

        Parameters that were used last may still be whole, and would be used again as they are: all are released, and
        those that ZeRO keeps whole are gathered again.
        """
        optimizer = self._engine.optimizer
        optimizer.parameter_offload.partition_all_parameters()
        persistent = optimizer.persistent_parameters
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            parameter.ds_tensor.data[: part.numel()].copy_(part)
        if persistent:
            persistent[0].all_gather(persistent)

    def _wholes(self, parts: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        """The whole parameters of all replicas' parts, some at a time."""
        bucket: list[tuple[Any, torch.Tensor]] = []
        for parameter, part in zip(self._parameters.values(), parts, strict=True):
            is_full = sum(each.numel() for each, _ in bucket) >= BUCKET
            if bucket and (is_full or bucket[0][0].dtype != parameter.dtype):
                yield from self._gathered(bucket)
                bucket = []
            bucket.append((parameter, part))
        if bucket:
            yield from self._gathered(bucket)

    def _gathered(self, bucket: list[tuple[Any, torch.Tensor]]) -> Iterator[torch.Tensor]:
        sizes = [-(-parameter.numel() // self.replicas) for parameter, _ in bucket]
        own = torch.cat(
            [
                torch.nn.functional.pad(part.to(parameter.dtype), (0, size - part.numel()))
                for (parameter, part), size in zip(bucket, sizes, strict=True)
            ]
        )
        rows = [own]
        if self.replicas > 1:
            rows = [torch.empty_like(own) for _ in range(self.replicas)]
            dist.all_gather(rows, own, group=self._group)
        start = 0
        for (parameter, _), size in zip(bucket, sizes, strict=True):
            flat = torch.cat([row[start : start + size] for row in rows])[: parameter.numel()]
            yield flat.view(parameter.shape)
            start += size
