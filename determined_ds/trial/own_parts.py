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

from determined_ds.trial.author import refused
from determined_ds.trial.expert_parallel import expert_degree_of
from determined_ds.trial.tensor_parallel import degree_of

CODE = "own-parts"


class OwnParts:
    """The trained parameters of an engine, of which each replica has its own part.

    Args:
        engine: DeepSpeed's, or a :class:`~determined_ds.trial.ddp.DDPEngine`.

    Raises:
        ConfigError: ZeRO keeps the parameters where they cannot be changed for a while; or ranks share layers or
            experts.

    Source: ``partition_parameters.py`` and ``stage3.py`` (``step``, ``_post_step``) in deepspeed 0.19.8's
    ``runtime/zero``.
    """

    def __init__(self, engine: Any) -> None:
        for key, degree, what in (
            ("model_parallel_size", degree_of(engine), "weights that tensor-parallel ranks cut"),
            ("expert_parallel_size", expert_degree_of(engine), "experts that ranks share"),
        ):
            if degree > 1:
                message = f"an average of {what} is not supported"
                raise refused(f"hyperparameters.{key}", message, "leave EMA out", CODE, value=degree)
        self._engine = engine
        self._parameters: list[Any] = [each for each in engine.module.parameters() if each.requires_grad]
        self._is_split = any(hasattr(parameter, "ds_tensor") for parameter in self._parameters)
        self._group = getattr(engine, "seq_data_parallel_group", None)
        if self._is_split:
            offload = engine._config.zero_config.offload_param
            if (offload is not None and offload.device == "nvme") or any(
                getattr(each, "ds_secondary_tensor", None) is not None
                or not each.ds_tensor.is_floating_point()
                for each in self._parameters
            ):
                message = (
                    "weights on NVMe, quantized, or with a copy by zero_hpz_partition_size cannot be averaged"
                )
                raise refused("zero_optimization", message, "remove that, or leave EMA out", CODE)
            self._group = self._parameters[0].ds_process_group
        alone = not dist.is_initialized()
        self._replicas = 1 if alone else dist.get_world_size(self._group)
        self._replica = 0 if alone else dist.get_rank(self._group)

    def _size(self, parameter: Any) -> int:
        """Numbers in a part; those of the last replicas may be fewer."""
        return int(parameter.ds_tensor.numel() if self._is_split else -(-parameter.numel() // self._replicas))

    def places(self) -> tuple[list[Any], list[int]]:
        """The parameters, and where in each of them this replica's part begins."""
        return self._parameters, [self._replica * self._size(parameter) for parameter in self._parameters]

    def values(self) -> list[torch.Tensor]:
        """This replica's part of each parameter as it is now, not copied, one-dimensional; it may be empty."""
        return [
            parameter.ds_tensor.data[: max(0, parameter.ds_numel - start)]
            if self._is_split
            else parameter.data.reshape(-1)[start : start + self._size(parameter)]
            for parameter, start in zip(*self.places(), strict=True)
        ]

    @contextlib.contextmanager
    def replaced_by(self, parts: list[torch.Tensor]) -> Iterator[None]:
        """In here the engine computes with other weights; a collective at both ends.

        Args:
            parts: This replica's, as :meth:`values` lists them.
        """
        if self._is_split:
            before = [parameter.ds_tensor.data.clone() for parameter in self._parameters]
            self._write_split(parts)
        else:
            before = [parameter.data for parameter in self._parameters]
            for parameter, part in zip(self._parameters, parts, strict=True):
                parameter.data = self._whole(parameter, part)
        try:
            yield
        finally:
            if self._is_split:
                self._write_split(before)
            else:
                for parameter, whole in zip(self._parameters, before, strict=True):
                    parameter.data = whole

    @torch.no_grad()
    def _write_split(self, parts: list[torch.Tensor]) -> None:
        """Write this rank's partitions, as a step of ZeRO 3 does.

        Parameters that were used last may still be whole, and would be used again as they are: all are released, and
        those that ZeRO keeps whole are gathered again.
        """
        optimizer = self._engine.optimizer
        optimizer.parameter_offload.partition_all_parameters()
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.ds_tensor.data[: part.numel()].copy_(part)
        if persistent := optimizer.persistent_parameters:
            persistent[0].all_gather(persistent)

    def _whole(self, parameter: Any, part: torch.Tensor) -> torch.Tensor:
        """A parameter put together of all replicas' parts."""
        padding = self._size(parameter) - part.numel()
        own = torch.nn.functional.pad(part.to(parameter.dtype), (0, padding))
        rows = [torch.empty_like(own) for _ in range(self._replicas)] if self._replicas > 1 else [own]
        if self._replicas > 1:
            dist.all_gather(rows, own, group=self._group)
        return torch.cat(rows)[: parameter.numel()].view(parameter.shape)
