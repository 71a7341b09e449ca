"""The compatibility table: what cannot run together, why, and how to fix it.

A row is here because the result would be silently wrong, because DeepSpeed's own words do not say what to change, or
because it is an everyday mistake, which should not wait for a cluster's queue. The rest DeepSpeed refuses itself, in
clear words as it starts. A row's comment says where it is known from: a file of deepspeed 0.19.8, or one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from determined_ds.config.ds_schema import ONE_BIT
from determined_ds.config.params import AUTO
from determined_ds.config.strategy import (
    DTYPES,
    HPZ,
    QUANTIZED,
    ZERO_OPTIMIZERS,
    Strategy,
    autotp_degree,
    expert_degree,
)
from determined_ds.documents.document import KeyPath
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.pipe.orders import ONE_F_ONE_B, ZB_H1, chunks_problem
from determined_ds.pipe.partition import MEASURED

if TYPE_CHECKING:
    from determined_ds.config.resolve import ResolvedConfig

ZERO = "zero_optimization"
HP = "hyperparameters"


Asked = Callable[["Strategy", "ResolvedConfig"], Any]
T = TypeVar("T")


class Rule(NamedTuple):
    """One row; its functions are asked of a strategy and of what it runs with, in which every "auto" is filled.

    Args:
        code: Short stable name.
        key: In the DeepSpeed JSON or below ``hyperparameters``: what the problem names, with its value and origin.
        breaks: Whether the rule is broken.
        message: What does not go together; ``{s...}`` is of the strategy.
        fix: What to write instead, in the same form.
        warning: Whether it can run, but is probably not intended.
    """

    code: str
    key: KeyPath
    breaks: Asked
    message: str | Asked
    fix: str | Asked
    warning: bool

    @property
    def counts_slots(self) -> bool:
        """Whether it says something of the slots, which means nothing where they cannot be divided as stated."""
        return self.code in ("more-ranks-than-devices", "zeropp-hpz-size")


def row(
    code: str, key: str, breaks: Asked, message: str | Asked, fix: str | Asked, warning: bool = False
) -> Rule:
    """A rule by its dotted key."""
    return Rule(code, tuple(key.split(".")), breaks, message, fix, warning)


def each(names: Iterable[T], make: Callable[[T], Rule]) -> Iterator[Rule]:
    """The same rule of several keys."""
    return map(make, names)


def broken_rules(c: ResolvedConfig, *, slots_origin: str = "") -> Iterator[tuple[Rule, Problem]]:
    """Every rule that a configuration breaks, with its problem."""
    s = c.strategy
    for rule in RULES:
        if not rule.breaks(s, c):
            continue
        message, fix = (
            said.format(s=s) if isinstance(said, str) else said(s, c) for said in (rule.message, rule.fix)
        )
        on_slots = rule.key == ("slots_per_trial",)
        of_trial = rule.key[0] == HP
        document, path = (c.hyperparameters, rule.key[1:]) if of_trial else (c.ds, rule.key)
        value = s.slots if on_slots else document.get(path, NOT_GIVEN)
        origin = slots_origin if on_slots else document.origin(path)
        key = document.key(path)
        yield rule, Problem(key=key, value=value, origin=origin, message=message, fix=fix, code=rule.code)


# ------------------------------------------------------------------------------------------- what several rows ask


def at(c: ResolvedConfig, *path: str) -> Any:
    """A value of the DeepSpeed JSON."""
    return c.ds.get(path)


def zero(c: ResolvedConfig, key: str) -> Any:
    """A value of ``zero_optimization``."""
    return c.ds.get((ZERO, key))


def on(c: ResolvedConfig, section: str) -> bool:
    """Whether a section is enabled."""
    return bool(c.ds.get((section, "enabled")))


def optimizer(c: ResolvedConfig) -> str:
    """The type of the JSON's optimizer in lower case; "" where it names none."""
    return str(c.ds.get(("optimizer", "type"), "")).lower()


def muon(c: ResolvedConfig) -> bool:
    return optimizer(c) == "muon"


def autotp(c: ResolvedConfig) -> int:
    return autotp_degree(c.ds.data)


def experts(c: ResolvedConfig) -> int:
    return expert_degree(c.ds.data)


def peak(c: ResolvedConfig) -> Any:
    return at(c, "scheduler", "params", "warmup_max_lr")


def communicated_in(s: Strategy, c: ResolvedConfig) -> str:
    """What gradients are reduced in; what the model computes in, unless stated."""
    return DTYPES.get(str(at(c, "communication_data_type")).lower(), s.precision)


def compiles_optimizer(s: Strategy, c: ResolvedConfig) -> bool:
    """Whether nvcc builds the JSON's optimizer at its first use.

    Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
    """
    kind = optimizer(c)
    if c.accelerator.name != "cuda" or kind not in ("adam", "adamw", "lamb", "lion", "muon"):
        return False
    if kind != "lamb" and s.offload_optimizer:
        return False  # built by g++, for the CPU
    return not at(c, "optimizer", "params", "torch_adam")


def sequence_length(c: ResolvedConfig) -> int:
    """The hyperparameter by which models of text state the tokens of a sample; 0 if there is none."""
    stated = c.hyperparameters.get(("sequence_length",))
    return stated if isinstance(stated, int) and not isinstance(stated, bool) else 0


def no_order(s: Strategy) -> str:
    """Why the pipeline's schedule cannot order the micro-batches; "" where it can, or where its chunks are refused."""
    pipe = s.pipeline
    return "" if s.pipe_parallel_size == 1 or chunks_problem(pipe.schedule, pipe.chunks) else pipe.problem()


WITHOUT_A_PIPELINE = (
    None,
    AUTO,
    False,
    ONE_F_ONE_B,
)  # what hyperparameters of a pipeline say where there is none
ALONE = {  # degree -> the rule that experts are not divided beside it
    "pipe_parallel_size": "expert-pipeline",
    "model_parallel_size": "expert-model",
    "sequence_parallel_size": "expert-sequence",
}

# fmt: off
RULES: tuple[Rule, ...] = (
    # ---- pipelines
    row("pipeline-zero-stage", f"{ZERO}.stage", lambda s, c: s.pipe_parallel_size > 1 and s.zero_stage > 1,
        "a pipeline (pipe_parallel_size {s.pipe_parallel_size}) runs with ZeRO stage 0 or 1 only, not {s.zero_stage}",
        "set zero_optimization.stage to 1, or pipe_parallel_size to 1"),
    # runtime/pipe/engine.py PipelineEngine.__init__
    row("pipeline-fp16-stage", "fp16.enabled",
        lambda s, c: s.pipe_parallel_size > 1 and on(c, "fp16") and s.zero_stage == 0,
        "without ZeRO a pipeline does not scale its fp16 loss, and divides the gradients by the scale",
        "set zero_optimization.stage to 1, or pipe_parallel_size to 1, or use bf16"),
    # runtime/engine.py DeepSpeedEngine.backward; runtime/fp16/unfused_optimizer.py
    row("more-ranks-than-devices", "slots_per_trial",  # one rank a GPU; at most four ranks a CPU core
        lambda s, c: s.slots > c.accelerator.max_ranks * c.machines,
        lambda s, c: (f"{s.slots} slots on a machine that carries {c.accelerator.max_ranks * c.machines} ranks"
            f" ({c.accelerator.num_devices} devices)"),
        lambda s, c: f"use --slots {c.accelerator.max_ranks * c.machines} or fewer"),
    row("pipe-schedule", f"{HP}.pipe_schedule", lambda s, c: no_order(s),
        lambda s, c: f"{no_order(s)}, with pipe_parallel_size {s.pipe_parallel_size}",
        "change micro_batch_size or global_batch_size, or take pipe_schedule: 1f1b"),
    # runtime/pipe/schedule.py DualPipeVSchedule; arXiv 2104.04473, section 2.2
    *each(("pipe_partitioned", "grad_partitioned"), lambda key:
        row("pipe-schedule-partitioned", f"pipeline.{key}",
            lambda s, c: s.pipe_parallel_size > 1 and s.pipe_schedule != ONE_F_ONE_B and at(c, "pipeline", key),
            "{s.pipe_schedule} sends whole activations and gradients", "remove it, or take pipe_schedule: 1f1b")),
    # runtime/pipe/dualpipev.py DualPipeVEngine.__init__; our trial/ordered_engine.py
    row("zb-h1", f"{HP}.pipe_schedule",
        lambda s, c: (s.pipe_parallel_size > 1 and s.pipe_schedule == ZB_H1
            and (s.activation_checkpointing or s.is_compiled)),
        "zb-h1 goes through a layer's backward pass in two parts: activation checkpointing would compute the layer anew"
        " for each, and the backward pass of a compiled layer has no parts",
        "take another pipe_schedule, or no activation checkpointing and no compiler"),
    # runtime/activation_checkpointing/checkpointing.py CheckpointFunction.backward, which raises;
    # torch 2.13 distributed/pipelining/schedules.py _check_torch_compile_compatibility
    *each(("pipe_schedule", "partition_method", "pipe_within_machine"), lambda name:
        row("one-stage", f"{HP}.{name}",
            lambda s, c: s.pipe_parallel_size == 1 and c.hyperparameters.get((name,)) not in WITHOUT_A_PIPELINE,
            "has no effect: there is one stage", f"set pipe_parallel_size to 2 or more, or remove {name}",
            warning=True)),
    row("partition-measured", f"{HP}.partition_method",
        lambda s, c: s.pipe_parallel_size > 1 and s.partition_method == MEASURED and s.model_parallel_size > 1,
        "one rank measures a layer, and with model_parallel_size {s.model_parallel_size} several compute it together",
        "use parameters, uniform or type:REGEX"),  # our trial/layer_times.py measured_layers
    row("pipeline-bubble", "gradient_accumulation_steps",
        lambda s, c: s.accumulation < s.pipe_parallel_size and not s.pipeline.problem(),
        lambda s, c: (f"{s.accumulation} micro-batches for {s.pipe_parallel_size} pipeline stages: by"
            f" {s.pipe_schedule} a stage waits {100 * s.bubble:.0f} % of the time"),
        lambda s, c: (f"use at least {s.pipe_parallel_size} micro-batches (4 x {s.pipe_parallel_size} leave a bubble"
            f" of {100 * replace(s, accumulation=4 * s.pipe_parallel_size).bubble:.0f} %)"), warning=True),
    # our pipe/timeline.py counted_bubble, by arXiv 1811.06965, 2104.04473 and 2401.10241
    # ---- shared: what ranks that share a sequence (Ulysses), a layer (AutoTP) or experts (AutoEP) cannot do
    *each(("pipe_parallel_size", "model_parallel_size"), lambda degree:
        row("sequence-alone", f"{HP}.sequence_parallel_size",
            lambda s, c: s.sequence_parallel_size > 1 and getattr(s, degree) > 1,
            f"DeepSpeed's groups of sequences are made of all ranks: it is not carried out with {degree}"
            f" {{s.{degree}}}", f"set sequence_parallel_size or {degree} to 1")),
    # __init__.py initialize; runtime/sequence_parallel/parallel_state_sp.py; utils/groups.py _init_tp_mesh_device
    row("sequence-degree", "sequence_parallel_size",
        lambda s, c: (at(c, "sequence_parallel_size") or 1) not in (1, s.sequence_parallel_size),
        "DeepSpeed would count replicas by it, and hyperparameters.sequence_parallel_size is"
        " {s.sequence_parallel_size}",
        "write hyperparameters.sequence_parallel_size, and remove it from the JSON"),
    # __init__.py initialize; runtime/config.py DeepSpeedConfig.__init__
    row("sequence-length", f"{HP}.sequence_length",
        lambda s, c: s.sequence_parallel_size > 1 and sequence_length(c) % s.sequence_parallel_size != 0,
        "cannot be cut into {s.sequence_parallel_size} slices of one length (sequence_parallel_size)",
        "use a sequence_length that {s.sequence_parallel_size} divides"),
    # runtime/sequence_parallel/ulysses_sp.py UlyssesSPDataLoaderAdapter.refill
    row("zeropp-groups", f"{ZERO}.{HPZ}",
        lambda s, c: s.zeropp and (s.sequence_parallel_size > 1 or autotp(c) > 1 or experts(c) > 0),
        "ZeRO++ averages over its own groups of all ranks, and those that share a sequence, layers or experts hold"
        " different parts", "remove zero_hpz_partition_size and the zero_quantized_ keys, or do not share them"),
    # runtime/comm/coalesced_collectives.py all_to_all_quant_reduce; utils/groups.py _create_zero_param_parallel_group
    row("deepcompile-shared", "compile.deepcompile",
        lambda s, c: s.deepcompile and (s.sequence_parallel_size > 1 or experts(c) > 0),
        "DeepCompile shards sequences by passes of its own, and takes the model as one graph, in which experts cannot"
        " exchange tokens", "set compile.deepcompile to false"),
    # compile/passes/sp_compile.py; runtime/engine.py DeepSpeedEngine.compile
    row("model-parallel-degree", "tensor_parallel.autotp_size",
        lambda s, c: autotp(c) not in (1, s.model_parallel_size),
        "differs from hyperparameters.model_parallel_size = {s.model_parallel_size}: ranks would share a replica that"
        " this counts as several, each with its own data",
        'set hyperparameters.model_parallel_size to the same, or write "auto" here'),
    # __init__.py initialize; runtime/config.py DeepSpeedConfig.__init__
    row("tensor-pipeline", "tensor_parallel.autotp_size",
        lambda s, c: s.pipe_parallel_size > 1 and autotp(c) > 1,
        "AutoTP replaces the groups of a pipeline by its own, of neighbouring ranks whatever their stage: the stages"
        " then wait for each other for ever",
        "set pipe_parallel_size to 1; or remove it, and build layers that cut themselves"),
    # runtime/engine.py DeepSpeedEngine._configure_tensor_parallel_states; measured with two stages of two ranks
    row("tensor-head", "tensor_parallel.vocab_parallel_lm_head",
        lambda s, c: at(c, "tensor_parallel", "vocab_parallel_lm_head") is True and autotp(c) > 1,
        "the model returns each rank its own part of the logits: a loss of the trial's own from them is wrong",
        "remove it, unless the trial takes the loss that the model computes (model(..., labels=...).loss)",
        warning=True),  # sequence/cross_entropy.py configure_vocab_parallel_loss
    row("expert-degree", f"{HP}.expert_parallel_size",
        lambda s, c: (isinstance(size := c.hyperparameters.get(("expert_parallel_size",)), int)
            and size != experts(c)),
        lambda s, c: f"differs from expert_parallel of the DeepSpeed JSON, which is {experts(c)} (0: not enabled)",
        "keep one of them"),  # runtime/engine.py DeepSpeedEngine._configure_expert_parallel
    row("expert-replicas", "expert_parallel.autoep_size",
        lambda s, c: experts(c) > 1 and s.replicas == s.slots and s.replicas % experts(c),
        lambda s, c: f"{s.replicas} replicas cannot be divided into groups of {experts(c)}",
        "use an expert_parallel_size that divides the replicas"),  # utils/groups.py _create_expert_and_data_parallel
    *each(ALONE, lambda degree:
        row(ALONE[degree], "expert_parallel.autoep_size", lambda s, c: getattr(s, degree) > 1 and experts(c) > 0,
            f"is not carried out with {degree} {{s.{degree}}}",
            f"remove expert_parallel_size, or set {degree} to 1")),
    # our trial/expert_parallel.py marks which experts a rank holds, for a model that is cut in no other way
    row("expert-precision", f"{ZERO}.stage",
        lambda s, c: s.zero_stage == 0 and s.precision != "fp32" and experts(c) > 0,
        "without ZeRO, the norm by which gradients of {s.precision} are clipped leaves out those of the experts",
        "set zero_optimization.stage to 1, 2 or 3"),  # runtime/fp16/unfused_optimizer.py FP16_UnfusedOptimizer.step
    row("expert-contiguous", f"{ZERO}.contiguous_gradients",
        lambda s, c: (zero(c, "contiguous_gradients") is False and s.zero_stage in (1, 2)
            and not s.uses_bf16_optimizer and experts(c) > 0),
        "gradients of experts come out wrong under ZeRO 1, and DeepSpeed refuses it under ZeRO 2",
        "remove contiguous_gradients"),
    # runtime/zero/stage_1_and_2.py; ZeRO 1 measured on four ranks, losses 0.0025 off after six steps
    row("expert-compiler", "compile.autoep_non_moe",
        lambda s, c: s.torch_compile and at(c, "compile", "autoep_non_moe") is not True and experts(c) > 0,
        "torch's compiler refuses grouped products of fp32, by which experts are computed",
        "set it to true: all but the layers of experts is compiled; or hyperparameters.torch_compile to false"),
    # torch 2.13 _meta_registrations.py _meta_grouped_mm_common; measured on two CPU ranks
    # ---- states: what each ZeRO stage can offload and leave out
    row("offload-param-stage", f"{ZERO}.offload_param", lambda s, c: s.offload_param and s.zero_stage != 3,
        "parameters can be offloaded only where they are partitioned: ZeRO stage 3, not {s.zero_stage}",
        "set zero_optimization.stage to 3, or remove offload_param"),  # runtime/zero/offload_config.py
    row("offload-optimizer-stage", f"{ZERO}.offload_optimizer",
        lambda s, c: s.offload_optimizer and s.zero_stage < 1,
        "the optimizer can be offloaded from ZeRO stage 1 on, not at stage {s.zero_stage}",
        "set zero_optimization.stage to 1, 2 or 3, or remove offload_optimizer"),
    # runtime/zero/stage_1_and_2.py (older texts say 2 and 3)
    row("offload-nvme-stage", f"{ZERO}.offload_optimizer.device",
        lambda s, c: s.offload_optimizer == "nvme" and s.zero_stage != 3,
        "the optimizer can be offloaded to nvme at ZeRO stage 3 only, not {s.zero_stage}",
        "use device cpu, or ZeRO stage 3"),  # runtime/zero/stage3.py (only stage 3 has swap_optimizer)
    *each(("offload_optimizer", "offload_param"), lambda what:  # runtime/zero/offload_config.py
        row("offload-nvme-path", f"{ZERO}.{what}.device",
            lambda s, c: getattr(s, what) == "nvme" and not at(c, ZERO, what, "nvme_path"),
            "offload to nvme needs a path to put the files", f"add zero_optimization.{what}.nvme_path")),
    row("compute-grad-norm-bf16", f"{ZERO}.compute_grad_norm",
        lambda s, c: zero(c, "compute_grad_norm") is False and s.zero_stage == 1 and s.uses_bf16_optimizer,
        "with bf16 weights and gradients accumulated in fp32, ZeRO stage 1 always computes the gradient's norm",
        "remove compute_grad_norm, or set zero_optimization.stage to 2"),
    # runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check
    row("zenflow-batch", f"{ZERO}.zenflow", lambda s, c: zero(c, "zenflow") is not None,
        "ZenFlow steps after every micro-batch and sets gradient_accumulation_steps to its update_interval: a step"
        " would not be a global batch",
        "remove zenflow; offload_optimizer alone keeps the batch"),  # runtime/zenflow/engine.py configure_zenflow
    # ---- precision: what is computed and kept in 16 bits
    row("fp16-and-bf16", "fp16.enabled", lambda s, c: on(c, "fp16") and on(c, "bf16"),
        "fp16 and bf16 exclude each other, and both are enabled", "disable one of them"),
    # runtime/config.py DeepSpeedConfig._initialize_params
    row("fp16-unsupported", "fp16.enabled", lambda s, c: on(c, "fp16") and not c.accelerator.fp16,
        "this accelerator does not train in fp16",
        'set fp16.enabled to "auto" or false, or bf16.enabled to true'),
    # runtime/engine.py DeepSpeedEngine._do_sanity_check
    row("grad-accum-mix", "data_types.grad_accum_dtype",
        lambda s, c: s.zero_stage == 0 and s.grad_dtype != s.precision,
        "without ZeRO, gradients are accumulated in what the model computes in, {s.precision}",
        "remove data_types.grad_accum_dtype, or set zero_optimization.stage to 1"),
    # runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check
    # ---- communication
    *each((HPZ, *QUANTIZED), lambda key:  # runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209
        row("zeropp-stage", f"{ZERO}.{key}", lambda s, c: (s.zero_stage != 3
            and (s.hpz_partition_size > 1 if key == HPZ else zero(c, key))),
            "ZeRO++ needs ZeRO stage 3, not {s.zero_stage}", f"set zero_optimization.stage to 3, or remove {key}")),
    row("zeropp-hpz-size", f"{ZERO}.{HPZ}",  # utils/groups.py _create_zero_param_parallel_group
        lambda s, c: s.hpz_partition_size > 1 and s.slots % min(s.hpz_partition_size, s.slots) != 0,
        "{s.slots} slots cannot be split into secondary partitions of {s.hpz_partition_size}",
        "use a zero_hpz_partition_size that divides the slots (usually the GPUs of one node)"),
    *each(QUANTIZED, lambda key:
        row("zeropp-quantized-cuda", f"{ZERO}.{key}",
            lambda s, c: c.accelerator.name != "cuda" and zero(c, key),
            "ZeRO++ quantization runs in CUDA kernels, and there is no CUDA device",
            f"run it on GPUs, or set {key} to false")),  # ops/op_builder/cpu/no_impl.py NotImplementedBuilder
    row("zeropp-gradients-machines", f"{ZERO}.zero_quantized_gradients",
        lambda s, c: c.machines > 1 and zero(c, "zero_quantized_gradients") and communicated_in(s, c) != "fp16",
        lambda s, c: (f"on {c.machines} machines the kernel reads gradients as fp16, and these are"
            f" {communicated_in(s, c)}: it would train on other numbers"),
        'add "communication_data_type": "fp16", or set zero_quantized_gradients to false'),
    # runtime/comm/coalesced_collectives.py all_to_all_quant_reduce
    # ---- optimizers
    row("onebit", "optimizer.type", lambda s, c: optimizer(c) in ONE_BIT,
        "1-bit optimizers are gone from DeepSpeed, and their compression backends with them", "use AdamW"),
    # runtime/engine.py DeepSpeedEngine._configure_basic_optimizer
    row("zero-untested-optimizer", "optimizer.type",  # runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check
        lambda s, c: (s.zero_stage > 0 and optimizer(c) not in ("", *ZERO_OPTIMIZERS, *ONE_BIT)
            and not at(c, "zero_allow_untested_optimizer")),
        lambda s, c: (f"ZeRO stage {s.zero_stage} takes Adam, AdamW, Adagrad, Lion and Muon, and refuses"
            f" {at(c, 'optimizer', 'type')}"),
        'use AdamW, set zero_optimization.stage to 0, or add "zero_allow_untested_optimizer": true'),
    row("optimizer-nvcc", "optimizer.type", compiles_optimizer,
        lambda s, c: (f"DeepSpeed's own {at(c, 'optimizer', 'type')} is compiled by nvcc before the first step, on"
            " every machine"),
        "use an image with the CUDA toolkit, or AdamW with torch_adam and fused left out, which takes torch's",
        warning=True),  # ops/adam/fused_adam.py, ops/lion/fused_lion.py, ops/lamb/fused_lamb.py
    row("muon-reduce-scatter", f"{ZERO}.reduce_scatter",
        lambda s, c: s.zero_stage == 3 and muon(c) and zero(c, "reduce_scatter") is not False,
        "Muon needs the whole gradient of a matrix, which ZeRO 3 hands out in parts",
        "add zero_optimization.reduce_scatter: false, or set zero_optimization.stage to 2"),
    # runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3.__init__
    row("muon-clipping", "gradient_clipping",
        lambda s, c: s.zero_stage > 0 and muon(c) and not s.uses_bf16_optimizer and at(c, "gradient_clipping"),
        "under ZeRO it clips Muon's updates, which are of a fixed size, and not the gradients: steps become many times"
        " smaller than without ZeRO",
        "set gradient_clipping to 0", warning=True),
    # runtime/zero/stage_1_and_2.py DeepSpeedZeroOptimizer.step; our tests/trial/test_muon.py
    row("muon-rates", "scheduler.params.warmup_max_lr",  # runtime/lr_schedules.py WarmupLR._format_param
        lambda s, c: (muon(c) and isinstance(peak(c), (int, float))
            and any(at(c, "optimizer", "params", name) is not None for name in ("muon_lr", "adam_lr"))),
        "the schedule gives all parameters this rate: muon_lr and adam_lr have no effect",
        "write a list, a rate for each parameter group: of each group its matrices, then the rest"),
    row("muon-rates-pipeline", "scheduler.params.warmup_max_lr",
        lambda s, c: s.pipe_parallel_size > 1 and muon(c) and isinstance(peak(c), (list, tuple)),
        "a stage without an embedding has fewer parameter groups than one with it, and a list has one length",
        "write one rate, for muon_lr and adam_lr alike"),
    # runtime/lr_schedules.py WarmupLR._format_param; runtime/engine.py _muon_param_groups
    row("muon-bf16-pipeline", "data_types.grad_accum_dtype",  # runtime/bf16_optimizer.py BF16_Optimizer.__init__
        lambda s, c: muon(c) and s.uses_bf16_optimizer and (s.slots > s.replicas or experts(c) > 0),
        "DeepSpeed steps this by its BF16_Optimizer, which takes Muon of plain replicas only: in no pipeline, and of no"
        " ranks that share sequences, layers or experts",
        "set zero_optimization.stage to 1 and data_types.grad_accum_dtype to bf16, or use AdamW"),
    # ---- execution
    row("cpu-checkpointing", "activation_checkpointing.cpu_checkpointing",
        lambda s, c: c.accelerator.name == "cpu" and at(c, "activation_checkpointing", "cpu_checkpointing"),
        "activations are on the CPU already, and DeepSpeed fails on moving them there",
        "remove cpu_checkpointing, or run it on GPUs"),
    # runtime/activation_checkpointing/checkpointing.py CheckpointFunction.forward
    row("deepcompile-cuda", "compile.deepcompile", lambda s, c: s.deepcompile and c.accelerator.name != "cuda",
        "DeepCompile is written for CUDA, and there is no CUDA device",
        "run it on GPUs, or write hyperparameters.torch_compile: true instead"),
    # compile/util.py is_deepcompile_supported
)
# fmt: on
