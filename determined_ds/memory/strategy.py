"""How the work of training is shared out, as far as memory depends on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.facts import DTYPES
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.documents.document import get_path

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Tensors of the parameters' size that an optimizer keeps; any other is taken to keep two, as Adam does.
OPTIMIZER_STATES = {"lion": 1, "adagrad": 1, "rmsprop": 1, "muon": 1, "rprop": 2, "sgd": 0}
ADAM_STATES = 2


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train a model. The defaults are DeepSpeed 0.19.8's, its precision apart.

    Args:
        zero_stage: 0 to 3.
        precision: What the model computes in: ``bf16``, ``fp16`` or ``fp32``.
        offload_optimizer: Optimizer states live in host memory; from ZeRO 1 on.
        offload_param: Parameters live in host memory; ZeRO 3.
        pipe_parallel_size: Pipeline stages.
        model_parallel_size: Ranks that share one layer.
        replicas: Data-parallel copies, which ZeRO divides the states among.
        micro_batch_size: Samples of a forward pass.
        accumulation: Micro-batches of an optimizer step; a pipeline's ``micro_batches``.
        activation_checkpointing: Each block is computed again in the backward pass.
        num_optimizer_states: Tensors of the parameters' size that the optimizer keeps: 2 for Adam, 1 for SGD with
            momentum, 0 for SGD.
        grad_accum_dtype: ``data_types.grad_accum_dtype``; the precision's, if None.
        master_dtype: ``fp32``, unless ``bf16_master_weights_and_grads`` or its like says otherwise.
        optimizer_state_dtype: ``fp32``, unless ``bf16_optimizer_states`` says otherwise.
        immediate_grad_update: ``bf16.immediate_grad_update``: bf16 gradients are let go as fp32 ones take them in.
        reduce_bucket_size: Elements.
        prefetch_bucket_size: Elements that ZeRO 3 fetches ahead of use.
        max_live_parameters: Parameters that ZeRO 3 keeps whole at a time.
        sub_group_size: Parameters that ZeRO 3 steps at a time.
        hpz_partition_size: Ranks that share ZeRO++'s second copy of the parameters; 1: there is none.
        overlap_comm: Reduce while computing, which takes a second bucket; DeepSpeed's own choice, if None.
        contiguous_gradients: Gradients are copied into a bucket.
    """

    zero_stage: int = 0
    precision: str = "bf16"
    offload_optimizer: bool = False
    offload_param: bool = False
    pipe_parallel_size: int = 1
    model_parallel_size: int = 1
    replicas: int = 1
    micro_batch_size: int = 1
    accumulation: int = 1
    activation_checkpointing: bool = False
    num_optimizer_states: int = ADAM_STATES
    grad_accum_dtype: str | None = None
    master_dtype: str = "fp32"
    optimizer_state_dtype: str = "fp32"
    immediate_grad_update: bool = False
    reduce_bucket_size: int = 500_000_000
    prefetch_bucket_size: int = 50_000_000
    max_live_parameters: int = 1_000_000_000
    sub_group_size: int = 1_000_000_000
    hpz_partition_size: int = 1
    overlap_comm: bool | None = None
    contiguous_gradients: bool = True

    def __post_init__(self) -> None:
        assert self.zero_stage in (0, 1, 2, 3), self
        assert {self.precision, self.grad_dtype, self.master_dtype} <= ELEMENT_BYTES.keys(), self
        sizes = (self.replicas, self.pipe_parallel_size, self.model_parallel_size, self.micro_batch_size)
        assert min(*sizes, self.accumulation, self.reduce_bucket_size) >= 1, self

    @property
    def grad_dtype(self) -> str:
        """What gradients are accumulated in."""
        return self.grad_accum_dtype or self.precision

    @property
    def element_bytes(self) -> int:
        """Bytes of a parameter as the model computes with it."""
        return ELEMENT_BYTES[self.precision]

    @property
    def slots(self) -> int:
        """Ranks in all."""
        return self.replicas * self.pipe_parallel_size * self.model_parallel_size

    @property
    def name(self) -> str:
        """In a few words: ``ZeRO 3 with the optimizer and the parameters offloaded``."""
        words = f"ZeRO {self.zero_stage}"
        if self.pipe_parallel_size > 1:
            words = f"a pipeline of {self.pipe_parallel_size} with {words}"
        moved = [
            what
            for what, is_moved in (
                ("the optimizer", self.offload_optimizer),
                ("the parameters", self.offload_param),
            )
            if is_moved
        ]
        return f"{words} with {' and '.join(moved)} offloaded" if moved else words


def strategy_of(resolved: ResolvedConfig, *, activation_checkpointing: bool = False) -> Strategy:
    """The strategy that a reconciled configuration asks for, read from the mapping that DeepSpeed is given.

    Args:
        resolved: What was decided.
        activation_checkpointing: As :func:`~determined_ds.memory.activation_checkpointing.is_checkpointed` tells.
    """
    ds = resolved.ds_config
    zero: Mapping[str, Any] = ds.get("zero_optimization") or {}
    accum = get_path(ds, ("data_types", "grad_accum_dtype"))

    def size(key: str, default: int) -> int:
        return int(default if zero.get(key) is None else zero[key])

    master = _master_dtype(ds)
    return Strategy(
        zero_stage=resolved.zero_stage,
        precision=_precision(ds),
        offload_optimizer=_is_offloaded(zero, "offload_optimizer"),
        offload_param=_is_offloaded(zero, "offload_param"),
        pipe_parallel_size=resolved.topology.pipe_parallel_size,
        model_parallel_size=resolved.topology.model_parallel_size,
        replicas=resolved.topology.data_parallel_world_size,
        micro_batch_size=resolved.batch.micro_batch_size,
        accumulation=resolved.batch.accumulation,
        activation_checkpointing=activation_checkpointing,
        num_optimizer_states=num_optimizer_states(ds.get("optimizer") or {}),
        grad_accum_dtype=None if accum is None else DTYPES.get(str(accum).lower()),
        master_dtype=master,
        optimizer_state_dtype=master if get_path(ds, (master, f"{master}_optimizer_states")) else "fp32",
        immediate_grad_update=bool(get_path(ds, ("bf16", "immediate_grad_update"), False)),
        reduce_bucket_size=size("reduce_bucket_size", Strategy.reduce_bucket_size),
        prefetch_bucket_size=size("stage3_prefetch_bucket_size", Strategy.prefetch_bucket_size),
        max_live_parameters=size("stage3_max_live_parameters", Strategy.max_live_parameters),
        sub_group_size=size("sub_group_size", Strategy.sub_group_size),
        hpz_partition_size=max(1, size("zero_hpz_partition_size", Strategy.hpz_partition_size)),
        overlap_comm=zero.get("overlap_comm"),
        contiguous_gradients=zero.get("contiguous_gradients", True),
    )


def num_optimizer_states(optimizer: Mapping[str, Any]) -> int:
    """Tensors that the optimizer of a DeepSpeed JSON keeps, its fp32 copy of the parameters aside.

    Args:
        optimizer: The section ``optimizer``; Adam is assumed where it names none.
    """
    kind = str(optimizer.get("type", "AdamW")).lower()
    params = optimizer.get("params") or {}
    if kind in ("sgd", "rmsprop") and params.get("momentum"):
        return OPTIMIZER_STATES[kind] + 1
    return OPTIMIZER_STATES.get(kind, ADAM_STATES)


def _precision(ds: Mapping[str, Any]) -> str:
    return next((name for name in ("fp16", "bf16") if get_path(ds, (name, "enabled")) is True), "fp32")


def _is_offloaded(zero: Mapping[str, Any], what: str) -> bool:
    section = zero.get(what)
    return isinstance(section, dict) and section.get("device") not in (None, "none")


def _master_dtype(ds: Mapping[str, Any]) -> str:
    """What the optimizer's copies are kept in. Source: deepspeed 0.19.8 runtime/precision_config.py."""
    low = (name for name in ("fp16", "bf16") if get_path(ds, (name, f"{name}_master_weights_and_grads")))
    return next(low, "fp32")
