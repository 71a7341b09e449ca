"""torch's own DistributedDataParallel, with the part of DeepSpeed's interface that trials and our loop use.

It serves as a baseline: the same model, optimizer, schedule, clipping and accumulation, without DeepSpeed. In fp32 its
losses are those of ZeRO stage 0. Of the DeepSpeed JSON it reads the batch sizes, ``optimizer``,
``scheduler``, ``gradient_clipping``, ``bf16``, ``fp16``, ``torch_autocast`` and ``communication_data_type``; the rest
only concerns DeepSpeed.

Half precision is torch's: ``bf16.enabled`` and ``fp16.enabled`` are an autocast of the forward pass over weights,
gradients and optimizer states in fp32, where DeepSpeed casts the weights and keeps copies in fp32. fp16 has a
``GradScaler`` and needs CUDA; it starts at the JSON's scale, and grows after ``loss_scale_window`` good steps (never,
with a fixed ``loss_scale``). Gradients are fp32, and are summed in what ``communication_data_type`` says by torch's own
hooks; in fp32 without it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
from deepspeed.runtime.constants import GRADIENT_CLIPPING_DEFAULT
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from determined_ds.config.strategy import DTYPES
from determined_ds.errors import ConfigError, Problem

DDP = "ddp"  # the context's ``engine`` that selects it
# Options of DeepSpeed's optimizers alone, which torch's do not need.
DEEPSPEEDS_OWN = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "bias_correction", "set_grad_none")
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
# torch's hooks that hand gradients over in half precision.
COMPRESSED = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
NEVER = 2**31 - 1
DDP_FILE, STEPS = "ddp.pt", "steps.json"


def initialize_ddp(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    model_parameters: Any,
    ds_config: Mapping[str, Any],
    device: torch.device,
) -> DDPEngine:
    """As ``deepspeed.initialize``, without DeepSpeed. A collective where there is more than one rank."""
    enabled = [name for name in HALVES if (ds_config.get(name) or {}).get("enabled")]
    autocast = ds_config.get("torch_autocast") or {}
    if not enabled and autocast.get("enabled"):
        enabled = [DTYPES[str(autocast["dtype"]).lower()]]
    dtype = HALVES.get(enabled[0]) if enabled else None
    if dtype == torch.float16 and device.type != "cuda":
        message = f"torch's DistributedDataParallel trains in fp16 on CUDA only, not on {device.type}"
        fix = 'set fp16.enabled to false, or bf16.enabled to true; or compare with "zero0" instead'
        _refuse("fp16.enabled", True, message, fix)
    model.to(device)
    if optimizer is None:
        optimizer = _optimizer(model_parameters, ds_config)
    return DDPEngine(
        module=model,
        optimizer=optimizer,
        lr_scheduler=_scheduler(optimizer, ds_config),
        ds_config=ds_config,
        device=device,
        dtype=dtype,
    )


def engine_name(engine: Any) -> str:
    """The kind of an engine, as a context's ``engine`` names it: ``ddp`` or ``deepspeed``."""
    return DDP if isinstance(engine, DDPEngine) else "deepspeed"


class DDPEngine(torch.nn.Module):
    """A model, its replicas kept in step by torch; on one rank, the bare model. ``dtype`` is that of its autocast."""

    module: torch.nn.Module

    def __init__(
        self,
        *,
        module: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        lr_scheduler: Any,
        ds_config: Mapping[str, Any],
        device: torch.device,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.module = module
        self.optimizer: Any = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.global_steps = self.micro_steps = self.skipped_steps = 0
        self._ds_config = ds_config
        self._dtype = dtype
        self._grad_norm: torch.Tensor | None = None
        self._scaler: torch.amp.GradScaler | None = None
        if dtype == torch.float16:  # DeepSpeedFP16Config in deepspeed 0.19.8's runtime/precision_config.py
            fp16 = ds_config.get("fp16") or {}
            fixed = float(fp16.get("loss_scale", 0))
            scale = fixed or 2.0 ** fp16.get("initial_scale_power", 16)
            window = NEVER if fixed else int(fp16.get("loss_scale_window", 1000))
            self._scaler = torch.amp.GradScaler("cuda", init_scale=scale, growth_interval=window)
        self._replica: torch.nn.parallel.DistributedDataParallel | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            replica = torch.nn.parallel.DistributedDataParallel(
                module, device_ids=[device] if device.type == "cuda" else None
            )
            hook = COMPRESSED.get(DTYPES.get(str(ds_config.get("communication_data_type")).lower(), ""))
            if hook is not None:
                replica.register_comm_hook(None, hook)
            # Not registered as a submodule: the parameters are listed once, by the names in DeepSpeed's engine.
            self.__dict__["_replica"] = replica

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output. Gradients are averaged only in the backward pass of the last micro-batch."""
        with torch.autocast(self.device.type, dtype=self._dtype, enabled=self._dtype is not None):
            if self._replica is None or not torch.is_grad_enabled():
                return self.module(*inputs, **kwargs)
            last = self.is_gradient_accumulation_boundary()
            with contextlib.nullcontext() if last else self._replica.no_sync():
                return self._replica(*inputs, **kwargs)

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """The backward pass of a micro-batch's mean loss; the batch's loss is the mean of these."""
        loss = loss / self.gradient_accumulation_steps()
        (loss if self._scaler is None else self._scaler.scale(loss)).backward()
        return loss

    def step(self) -> None:
        """End a micro-batch; after the last one of a batch the optimizer steps."""
        if self.is_gradient_accumulation_boundary():
            overflown, limit = False, self.gradient_clipping()
            if self._scaler is not None:
                self._scaler.unscale_(self.optimizer)
            if limit:
                self._grad_norm = torch.nn.utils.clip_grad_norm_(self.module.parameters(), limit)
            if self._scaler is None:
                self.optimizer.step()
            else:
                before = self._scaler.get_scale()
                self._scaler.step(self.optimizer)
                self._scaler.update()
                overflown = self._scaler.get_scale() < before
                self.skipped_steps += overflown
            if self.lr_scheduler is not None and not overflown:
                self.lr_scheduler.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.global_steps += 1
        self.micro_steps += 1

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """``torch.compile`` the model, in place."""
        self.module.compile(*args, **kwargs)

    # ----------------------------------------------------------------------- DeepSpeed's interface

    def is_gradient_accumulation_boundary(self) -> bool:
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def train_batch_size(self) -> int:
        return int(self._ds_config["train_batch_size"])

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._ds_config["train_micro_batch_size_per_gpu"])

    def gradient_accumulation_steps(self) -> int:
        return int(self._ds_config["gradient_accumulation_steps"])

    def gradient_clipping(self) -> float:
        return float(self._ds_config.get("gradient_clipping", GRADIENT_CLIPPING_DEFAULT))

    def get_lr(self) -> list[float]:
        return [group["lr"] for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """The norm in the last step, before clipping; None without clipping."""
        return None if self._grad_norm is None else float(self._grad_norm)

    def _get_optimizer_loss_scale(self) -> float | None:
        return None if self._scaler is None else float(self._scaler.get_scale())

    def fp16_enabled(self) -> bool:
        return self._dtype == torch.float16

    def bfloat16_enabled(self) -> bool:
        return self._dtype == torch.bfloat16

    def zero_optimization_stage(self) -> int:
        return 0

    def save_checkpoint(self, save_dir: str | os.PathLike[str], tag: str | None = None, **_: Any) -> bool:
        """Write weights, optimizer, schedule and loss scale; rank 0 does, since all ranks hold the same."""
        if not dist.is_initialized() or dist.get_rank() == 0:
            folder = Path(save_dir) / str(tag)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save({name: part.state_dict() for name, part in self._parts().items()}, folder / DDP_FILE)
            (folder / STEPS).write_text(json.dumps([self.global_steps, self.micro_steps, self.skipped_steps]))
        return True

    def load_checkpoint(
        self, load_dir: str | os.PathLike[str], tag: str | None = None, **_: Any
    ) -> tuple[str, dict[str, Any]]:
        """Read back what :meth:`save_checkpoint` wrote."""
        folder = Path(load_dir) / str(tag)
        # To the host, where Adam keeps its step counts; the rest is copied to where it belongs.
        state = torch.load(folder / DDP_FILE, map_location="cpu")
        for name, part in self._parts().items():
            part.load_state_dict(state[name])
        self.global_steps, self.micro_steps, self.skipped_steps = json.loads((folder / STEPS).read_text())
        return str(folder), {}

    def _parts(self) -> dict[str, Any]:
        names = {
            "module": "module",
            "optimizer": "optimizer",
            "lr_scheduler": "lr_scheduler",
            "scaler": "_scaler",
        }
        found = {name: getattr(self, attribute) for name, attribute in names.items()}
        return {name: part for name, part in found.items() if part is not None}


def _optimizer(parameters: Any, ds_config: Mapping[str, Any]) -> torch.optim.Optimizer:
    """torch's optimizer with the computation of DeepSpeed's of the same name.

    Source: ``_configure_basic_optimizer`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    section = ds_config.get("optimizer") or {}
    if not section.get("type"):
        fix = "name one in the DeepSpeed JSON, e.g. AdamW; or return one from build_optimizer"
        _refuse("optimizer.type", None, "is missing: training needs an optimizer", fix)
    kind, params = str(section["type"]), dict(section.get("params") or {})
    name = {"adamw": "AdamW", "adagrad": "Adagrad"}.get(kind.lower(), kind)
    if kind.lower() == "adam":
        # DeepSpeed's Adam is AdamW by default.
        name = "AdamW" if params.get("adam_w_mode", True) else "Adam"
    found = getattr(torch.optim, name, None)
    is_deepspeeds = kind.lower() in DEEPSPEED_OPTIMIZERS and kind.lower() not in ("adam", "adamw", "adagrad")
    if is_deepspeeds or not (isinstance(found, type) and issubclass(found, torch.optim.Optimizer)):
        message = "must be one of torch's optimizers with DistributedDataParallel"
        _refuse("optimizer.type", kind, message, "use AdamW, Adam, SGD or another of torch.optim")
    if params.get("bias_correction", True) is False:
        message = f"torch's {name} always corrects its bias"
        _refuse("optimizer.params.bias_correction", False, message, "remove it")
    for key in DEEPSPEEDS_OWN:
        params.pop(key, None)
    try:
        return found(parameters, **params)
    except (TypeError, ValueError) as error:
        message = f"torch's {name} does not take them: {error}"
        _refuse("optimizer.params", params, message, "change or remove it")


def _scheduler(optimizer: torch.optim.Optimizer, ds_config: Mapping[str, Any]) -> Any:
    """DeepSpeed's or torch's schedule for the optimizer; None where the JSON has none.

    Source: ``_scheduler_from_config`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    section = ds_config.get("scheduler") or {}
    kind = section.get("type")
    if kind is None:
        return None
    found: Any = getattr(lr_schedules, kind, None) or getattr(torch.optim.lr_scheduler, kind, None)
    if found is None:
        fix = "use WarmupLR, WarmupDecayLR, WarmupCosineLR or OneCycle"
        _refuse("scheduler.type", kind, "is not a schedule of DeepSpeed or torch", fix)
    return found(optimizer, **(section.get("params") or {}))


def _refuse(key: str, value: Any, message: str, fix: str) -> NoReturn:
    raise ConfigError(Problem(key=key, value=value, message=message, fix=fix, code=DDP))
