"""torch's own DistributedDataParallel, with the part of DeepSpeed's interface that trials and our loop use.

It serves as a baseline: the same model, optimizer, schedule, clipping and accumulation, without DeepSpeed. In fp32 its
losses are those of ZeRO stage 0. ``bf16.enabled`` is torch's autocast of the forward pass over weights, gradients and
optimizer states in fp32, where DeepSpeed casts the weights and keeps copies in fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

from determined_ds.errors import ConfigError
from determined_ds.trial.returned import refused

DDP = "ddp"  # the context's ``engine`` that selects it
# Options of DeepSpeed's optimizers alone, which torch's do not need.
DEEPSPEEDS_OWN = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "set_grad_none")
# DeepSpeed's name -> torch's class that computes the same; its Adam is AdamW by default.
OPTIMIZERS = {"adam": "AdamW", "adamw": "AdamW", "adagrad": "Adagrad"}


def engine_name(engine: Any) -> str:
    """The kind of an engine, as a context's ``engine`` names it: ``ddp`` or ``deepspeed``."""
    return DDP if isinstance(engine, DDPEngine) else "deepspeed"


class DDPEngine(torch.nn.Module):
    """A model, its replicas kept in step by torch; on one rank, the bare model. Making one is a collective.

    ``optimizer`` is the author's; None: that of ``ds_config``, over ``parameters``.
    """

    def __init__(self, module: Any, optimizer: Any, parameters: Any, ds_config: Any, device: Any) -> None:
        super().__init__()
        for name in ("fp16", "torch_autocast"):
            if (ds_config.get(name) or {}).get("enabled"):
                raise _refused(f"{name}.enabled", True, "computes in fp32 or bf16")
        if (sent := ds_config.get("communication_data_type")) is not None:
            raise _refused("communication_data_type", sent, "sends gradients in fp32")
        self.module, self.device, self._ds_config = module.to(device), device, ds_config
        self.optimizer: Any = _optimizer(parameters, ds_config) if optimizer is None else optimizer
        # Source: _scheduler_from_config in deepspeed 0.19.8's runtime/engine.py
        section, self.lr_scheduler = ds_config.get("scheduler") or {}, None
        if (kind := section.get("type")) is not None:
            found: Any = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
            self.lr_scheduler = found(self.optimizer, **(section.get("params") or {}))
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self._grad_norm: torch.Tensor | None = None
        self._replica: torch.nn.parallel.DistributedDataParallel | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            device_ids = [device] if device.type == "cuda" else None
            # Not registered as a submodule: the parameters are listed once, by the names in DeepSpeed's engine.
            self.__dict__["_replica"] = torch.nn.parallel.DistributedDataParallel(module, device_ids)

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output. Gradients are averaged only in the backward pass of the last micro-batch."""
        with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=self.bfloat16_enabled()):
            if self._replica is None or not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            last = self.is_gradient_accumulation_boundary()
            with contextlib.nullcontext() if last else self._replica.no_sync():
                return self._replica(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward pass of a micro-batch's mean loss; the batch's loss is the mean of these."""
        loss = loss / self.gradient_accumulation_steps()
        loss.backward()
        return loss

    def step(self) -> None:
        """End a micro-batch; after the last one of a batch the optimizer steps."""
        if self.is_gradient_accumulation_boundary():
            if limit := self.gradient_clipping():
                self._grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
            self.optimizer.step()
            if self.lr_scheduler is not None:
                self.lr_scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.global_steps += 1
        self.micro_steps += 1

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self.module.compile(*args, **kwargs)

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def train_batch_size(self) -> int:
        return int(self._ds_config["train_batch_size"])

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._ds_config["train_micro_batch_size_per_gpu"])

    def gradient_accumulation_steps(self) -> int:
        return int(self._ds_config["gradient_accumulation_steps"])

    def gradient_clipping(self) -> float:
        return float(self._ds_config.get("gradient_clipping", 0.0))

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm in the last step, before clipping; None without clipping."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def fp16_enabled(self) -> bool:
        return False

    def bfloat16_enabled(self) -> bool:
        return bool((self._ds_config.get("bf16") or {}).get("enabled"))

    def zero_optimization_stage(self) -> int:
        return 0


def _optimizer(parameters: Any, ds_config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """torch's optimizer of the same computation: ``_configure_basic_optimizer`` in deepspeed 0.19.8's engine.py."""
    section = ds_config.get("optimizer") or {}
    kind, params = str(section.get("type")), dict(section.get("params") or {})
    name = OPTIMIZERS.get(kind.lower(), kind)
    if kind.lower() == "adam" and not params.get("adam_w_mode", True):
        name = "Adam"
    found = getattr(torch.optim, name, None)
    is_deepspeeds = kind.lower() in DEEPSPEED_OPTIMIZERS and kind.lower() not in OPTIMIZERS
    if is_deepspeeds or not isinstance(found, type):
        fix = "use AdamW, Adam, SGD or another of torch.optim; or return one from build_optimizer"
        raise _refused("optimizer.type", section.get("type"), "needs one of torch's optimizers", fix)
    if params.get("bias_correction"):
        del params["bias_correction"]  # torch always does; where it is off, torch refuses the argument
    return found(parameters, **{key: each for key, each in params.items() if key not in DEEPSPEEDS_OWN})  # type: ignore[no-any-return]


def _refused(
    key: str, value: Any, does: str, fix: str = "change or remove it, or compare with zero0"
) -> ConfigError:
    return refused(key, f"torch's DistributedDataParallel {does}", fix, DDP, value=value)
