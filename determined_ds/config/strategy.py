"""How a training is carried out: one :class:`Strategy`, read from a DeepSpeed JSON here alone, or taken by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from determined_ds.documents.document import get_path
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES, Pipeline, default_chunks
from determined_ds.pipe.partition import method_problem
from determined_ds.pipe.timeline import counted_bubble

if TYPE_CHECKING:
    from determined_ds.config.resolve import ResolvedConfig

ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# How DeepSpeed writes them. Source: deepspeed 0.19.8 runtime/config.py DtypeEnum.
DTYPES = {
    **dict.fromkeys(("fp32", "float32", "torch.float32", "float"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "half", "float16", "torch.float16", "torch.half"), "fp16"),
}
# Tensors of the parameters' size that an optimizer keeps; any other is assumed to keep two, as Adam does.
OPTIMIZER_STATES = {"lion": 1, "adagrad": 1, "rmsprop": 1, "muon": 1, "sgd": 0}
ADAM_STATES = 2
# Of the optimizers that a JSON can name, those that ZeRO takes; the mu- ones make an Adam of torch's.
# Source: deepspeed 0.19.8 runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS; mup's optim.py.
ZERO_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})
HPZ = "zero_hpz_partition_size"
QUANTIZED = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")
# Keys of zero_optimization that are fields of a strategy.
OF_ZERO = {
    "stage": "zero_stage",
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_max_live_parameters": "max_live_parameters",
    HPZ: "hpz_partition_size",
    **{key: key for key in ("reduce_bucket_size", "sub_group_size", "overlap_comm", "contiguous_gradients")},
}
# Hyperparameters by which models are asked to checkpoint activations: switches, and a number of layers.
SWITCHES = ("activation_checkpointing", "gradient_checkpointing")
INTERVAL = "activation_checkpoint_interval"
OFF = ("", "none", "off", "no", "false")


@dataclass(frozen=True, kw_only=True)
class Strategy:
    """One way to train a model. The defaults are DeepSpeed 0.19.8's, its precision apart."""

    zero_stage: int = 0  # 0 to 3
    precision: str = "bf16"  # what the model computes in: bf16, fp16 or fp32
    offload_optimizer: str | None = None  # where its states live: cpu or nvme; None: the device. ZeRO 1 to 3
    offload_param: str | None = None  # the same of the parameters; ZeRO 3
    pipe_parallel_size: int = 1  # pipeline stages
    model_parallel_size: int = 1  # ranks that share one layer
    sequence_parallel_size: int = 1  # ranks that share a sequence
    expert_parallel_size: int = 1  # replicas that share the experts of a model, each with a part of them
    replicas: int = 1  # ZeRO divides the states among all ranks of them that hold the same layers
    micro_batch_size: int = 1  # samples of a forward pass
    accumulation: int = 1  # micro-batches of an optimizer step; a pipeline's micro_batches
    activation_checkpointing: bool = False  # each block is computed again in the backward pass
    num_optimizer_states: int = ADAM_STATES  # tensors of the parameters' size: 2 for Adam, 0 for plain SGD
    grad_accum_dtype: str | None = None  # data_types.grad_accum_dtype; None: the precision
    master_dtype: str = "fp32"  # unless bf16_master_weights_and_grads or its like says otherwise
    optimizer_state_dtype: str = "fp32"  # unless bf16_optimizer_states says otherwise
    immediate_grad_update: bool = False  # bf16 gradients are let go as fp32 ones take them in
    reduce_bucket_size: int = 500_000_000  # elements
    prefetch_bucket_size: int = 50_000_000  # elements that ZeRO 3 fetches ahead of use
    max_live_parameters: int = 1_000_000_000  # that ZeRO 3 keeps whole at a time
    sub_group_size: int = 1_000_000_000  # parameters that ZeRO 3 steps at a time
    hpz_partition_size: int = 1  # ranks that share ZeRO++'s second copy of the parameters; 1: there is none
    zeropp: bool = False  # any of ZeRO++: quantized communication, or a second copy of the parameters
    overlap_comm: bool | None = None  # reduce while computing, by a second bucket; None: DeepSpeed's choice
    contiguous_gradients: bool = True  # gradients are copied into a bucket
    torch_compile: bool = False  # engines compile their models by torch.compile
    deepcompile: bool = False  # they compile by DeepSpeed's DeepCompile
    pipe_schedule: str = ONE_F_ONE_B  # one of determined_ds.pipe.orders.SCHEDULES
    pipe_chunks: int = 1  # parts of the model that a pipeline's rank holds
    partition_method: str | None = None  # how a pipeline's layers are shared out; None: as its trial says

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
        return self.shards * self.pipe_parallel_size * self.model_parallel_size

    @property
    def shards(self) -> int:
        """Ranks that hold the same layers, among which ZeRO divides the states: replicas x sequence."""
        return self.replicas * self.sequence_parallel_size

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether bf16 weights are stepped by DeepSpeed's BF16_Optimizer, and not by that of ZeRO.

        Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check.
        """
        if self.precision != "bf16":
            return False
        if self.zero_stage == 0:
            return self.pipe_parallel_size > 1 and self.grad_dtype == "bf16"
        return self.zero_stage == 1 and self.grad_dtype == "fp32" and self.offload_optimizer is None

    @property
    def pipeline(self) -> Pipeline:
        """What its ranks compute in which order."""
        return Pipeline(
            schedule=self.pipe_schedule,
            ranks=self.pipe_parallel_size,
            micro_batches=self.accumulation,
            chunks=self.pipe_chunks,
        )

    @property
    def bubble(self) -> float:
        """The share of time in which pipeline stages wait by the schedule alone; 0 without a pipeline."""
        return counted_bubble(self.pipeline) if self.pipe_parallel_size > 1 else 0.0

    @property
    def name(self) -> str:
        """In a few words: ``ZeRO 3 with the optimizer and the parameters offloaded``."""
        words = f"ZeRO {self.zero_stage}"
        if self.pipe_parallel_size > 1:
            order = "" if self.pipe_schedule == ONE_F_ONE_B else f" ({self.pipe_schedule}"
            order += f", {self.pipe_chunks} chunks" if self.pipe_chunks > 1 else ""
            words = f"a pipeline of {self.pipe_parallel_size}{order and order + ')'} with {words}"
        if self.sequence_parallel_size > 1:
            words = f"sequences split among {self.sequence_parallel_size} ranks with {words}"
        parts = (("the optimizer", self.offload_optimizer), ("the parameters", self.offload_param))
        moved = " and ".join(what for what, device in parts if device)
        return f"{words} with {moved} offloaded" if moved else words

    def checkpointed_by(self, interval: int | None) -> Strategy:
        """The same, with activation checkpointing where a ``PipelineTrial`` states its interval."""
        return replace(self, activation_checkpointing=True) if interval else self


def read_strategy(c: ResolvedConfig) -> Strategy:
    """The strategy that a configuration asks for, by its DeepSpeed JSON and by hyperparameters."""
    ds, hyperparameters, topology = c.ds.data, c.hyperparameters.data, c.topology
    zero = {key: value for key, value in (ds.get("zero_optimization") or {}).items() if value is not None}
    own = {field: zero[key] for key, field in OF_ZERO.items() if key in zero}
    for what in ("offload_optimizer", "offload_param"):
        device = get_path(zero, (what, "device"))
        own[what] = None if device == "none" else device
    schedule, chunks = schedule_of(hyperparameters)
    method = hyperparameters.get("partition_method")
    accumulated = get_path(ds, ("data_types", "grad_accum_dtype"))
    # Source: deepspeed 0.19.8 runtime/precision_config.py.
    low = (name for name in ("fp16", "bf16") if get_path(ds, (name, f"{name}_master_weights_and_grads")))
    master = next(low, "fp32")
    # The JSON's section activation_checkpointing turns nothing on: it has the options of DeepSpeed's own functions, for
    # a model that calls them. Source: deepspeed 0.19.8 runtime/pipe/engine.py PipelineEngine.__init__.
    interval = get_path(ds, ("pipeline", INTERVAL))
    by_engine = topology.pipe_parallel_size > 1 and isinstance(interval, int) and interval > 0
    return Strategy(
        **own,
        precision=next((name for name in ("fp16", "bf16") if get_path(ds, (name, "enabled"))), "fp32"),
        pipe_parallel_size=topology.pipe_parallel_size,
        model_parallel_size=topology.model_parallel_size,
        sequence_parallel_size=topology.sequence_parallel_size,
        expert_parallel_size=max(1, expert_degree(ds)),
        replicas=topology.data_parallel_world_size,
        micro_batch_size=c.batch.micro_batch_size,
        accumulation=c.batch.accumulation,
        activation_checkpointing=by_engine or is_asked_of_model(hyperparameters),
        num_optimizer_states=_num_optimizer_states(ds.get("optimizer") or {}, zero.get("stage", 0)),
        grad_accum_dtype=None if accumulated is None else DTYPES.get(str(accumulated).lower()),
        master_dtype=master,
        optimizer_state_dtype=master if get_path(ds, (master, f"{master}_optimizer_states")) else "fp32",
        immediate_grad_update=bool(get_path(ds, ("bf16", "immediate_grad_update"))),
        zeropp=any(zero.get(key) for key in QUANTIZED) or zero.get(HPZ, 1) > 1,
        torch_compile=c.torch_compile,
        deepcompile=bool(get_path(ds, ("compile", "deepcompile"))),
        pipe_schedule=schedule,
        pipe_chunks=chunks,
        partition_method=None if method_problem(method) else str(method),
    )


def autotp_degree(ds: Mapping[str, Any]) -> int:
    """Ranks that share a layer by DeepSpeed's AutoTP, ``tensor_parallel.autotp_size``; 1: none."""
    size = get_path(ds, ("tensor_parallel", "autotp_size"))
    return size if type(size) is int and size > 1 else 1


def expert_degree(ds: Mapping[str, Any]) -> int:
    """Ranks that share the experts of a model by DeepSpeed's AutoEP; 0 where it leaves them as they are.

    The replicas are divided into groups of ``expert_parallel.autoep_size``, by default 1, and each rank of a group
    holds a part of the experts. The slots do not grow by it: every rank is a replica with its own data.
    """
    if get_path(ds, ("expert_parallel", "enabled")) is not True:
        return 0
    size = get_path(ds, ("expert_parallel", "autoep_size"))
    return 1 if size is None else size if type(size) is int else 0


def schedule_of(hyperparameters: Mapping[str, Any]) -> tuple[str, int]:
    """The schedule of a pipeline, and its parts a rank, stated or not."""
    schedule, chunks = (hyperparameters.get(name) for name in ("pipe_schedule", "pipe_chunks"))
    schedule = schedule if schedule in SCHEDULES else ONE_F_ONE_B
    return schedule, chunks if isinstance(chunks, int) and chunks >= 1 else default_chunks(schedule)


def is_asked_of_model(hyperparameters: Mapping[str, Any]) -> bool:
    """Whether a hyperparameter asks for activation checkpointing."""
    values = [hyperparameters.get(name) for name in (*SWITCHES, INTERVAL)]
    return any(value.lower() not in OFF if isinstance(value, str) else bool(value) for value in values)


def _num_optimizer_states(optimizer: Mapping[str, Any], zero_stage: int) -> int:
    """Tensors that the optimizer of a JSON keeps, its fp32 copy of the parameters aside; Adam where it names none."""
    kind = str(optimizer.get("type", "AdamW")).lower()
    if kind == "muon" and zero_stage in (1, 2):
        # Of matrices a second momentum, that of the step under way; of all else an Adam's two.
        return ADAM_STATES  # deepspeed 0.19.8 runtime/zero/stage_1_and_2.py _muon_staging_momentum
    has_momentum = kind in ("sgd", "rmsprop") and bool((optimizer.get("params") or {}).get("momentum"))
    return OPTIMIZER_STATES.get(kind, ADAM_STATES) + has_momentum


# ------------------------------------------------------------------------------------------- by name

# What a named strategy sets; all else stays as the experiment has it. Those that set pipe_schedule are pipelines, None
# leaving the order as it is. Beside the fields of Strategy there is `engine`, which is DeepSpeed's or torch's own
# DistributedDataParallel (ddp).
Named = Mapping[str, Any]
_OFFLOAD = {"offload_optimizer": "cpu"}
# What fits almost any model, the fastest first, which is the one that needs most memory.
PLAIN: dict[str, Named] = {
    **{f"zero{stage}": {"zero_stage": stage} for stage in range(4)},
    "zero1_offload": {"zero_stage": 1, **_OFFLOAD},
    "zero2_offload": {"zero_stage": 2, **_OFFLOAD},
    "zero3_offload_optimizer": {"zero_stage": 3, **_OFFLOAD},
    "zero3_offload": {"zero_stage": 3, **_OFFLOAD, "offload_param": "cpu"},
}
FORMS: dict[str, Named] = {
    "pipeline": {"pipe_schedule": None},
    "pipeline_zero1": {"pipe_schedule": None, "zero_stage": 1},
    **PLAIN,
    # The experiment's own pipeline in another order; one of as many stages as slots, where it has none.
    **{schedule: {"pipe_schedule": schedule} for schedule in SCHEDULES},
    "zeropp": {"zero_stage": 3, "zeropp": True},
    "ddp": {"engine": "ddp"},
}


def plain_forms(*, has_stages: bool) -> list[Strategy]:
    """The ZeRO stages and offloads of :data:`PLAIN`; of a pipeline stages 0 and 1, which do not offload."""
    return (
        [Strategy(zero_stage=0), Strategy(zero_stage=1)]
        if has_stages
        else [Strategy(**form) for form in PLAIN.values()]
    )
