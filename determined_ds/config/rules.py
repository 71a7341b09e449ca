"""The compatibility table: what cannot run together, why, and how to fix it.

A row is here because the result would be silently wrong, because DeepSpeed's own words do not say what to change, or
because it is an everyday mistake, which should not wait for a cluster's queue. The rest DeepSpeed refuses itself, in
clear words as it starts. A row's comment says where it is known from: a file of deepspeed 0.19.8, or one of ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from determined_ds.config.ds_schema import TORCH_TYPES, ZERO
from determined_ds.config.params import AUTO, LOGGING
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

HP = "hyperparameters"
# Rules that say something of the slots, which means nothing where these cannot be divided as stated.
OF_SLOTS = ("more-ranks-than-devices", "zeropp-hpz-size")
Breaks = Callable[["Strategy", "ResolvedConfig", Any], Any]


class Rule(NamedTuple):
    """One rule. In texts ``{s}`` is the strategy, ``{found}`` what ``breaks`` returns, ``{value}`` that of the key."""

    code: str
    key: KeyPath  # in the DeepSpeed JSON or below ``hyperparameters``; ``{key}`` is its last part
    breaks: Breaks  # of the strategy, what it runs with, every "auto" filled, and the value; false where nothing does
    message: str
    fix: str
    warning: bool  # it can run, but is probably not intended


def row(code: str, keys: str, breaks: Breaks, message: str, fix: str, warning: bool = False) -> list[Rule]:
    """A rule of each of several dotted keys."""
    return [Rule(code, tuple(key.split(".")), breaks, message, fix, warning) for key in keys.split()]


def broken_rules(c: ResolvedConfig, *, slots_origin: str = "") -> Iterator[tuple[Rule, Problem]]:
    """Every rule that a configuration breaks, with its problem."""
    s = c.strategy
    for rule in RULES:
        on_slots, of_trial = rule.key == ("slots_per_trial",), rule.key[0] == HP
        document, path = (c.hyperparameters, rule.key[1:]) if of_trial else (c.ds, rule.key)
        value = s.slots if on_slots else document.get(path, NOT_GIVEN)
        found = rule.breaks(s, c, None if value is NOT_GIVEN else value)
        if not found:
            continue
        origin = slots_origin if on_slots else document.origin(path)
        names = {"s": s, "found": found, "key": path[-1], "value": value}
        message, fix = rule.message.format(**names), rule.fix.format(**names)
        shown = "***" if rule.code == "logger-secret" else value
        key = document.key(path)
        yield rule, Problem(key=key, value=shown, origin=origin, message=message, fix=fix, code=rule.code)


# ------------------------------------------------------------------------------------------- what several rows ask


def at(c: ResolvedConfig, key: str) -> Any:
    """The value of the DeepSpeed JSON at a dotted key."""
    return c.ds.get(tuple(key.split(".")))


def optimizer(c: ResolvedConfig) -> str:
    """The type of the JSON's optimizer in lower case; "" where it names none."""
    return str(c.ds.get(("optimizer", "type"), "")).lower()


def compiles_optimizer(s: Strategy, c: ResolvedConfig) -> bool:
    """Whether nvcc builds the JSON's optimizer at its first use.

    Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
    """
    kind = optimizer(c)
    if c.accelerator.name != "cuda" or kind not in ("adam", "adamw", "lamb", "lion", "muon"):
        return False
    if kind != "lamb" and s.offload_optimizer:
        return False  # built by g++, for the CPU
    return not at(c, "optimizer.params.torch_adam")


def _autotp(c: ResolvedConfig) -> int:
    return autotp_degree(c.ds.data)


def _experts(c: ResolvedConfig) -> int:
    return expert_degree(c.ds.data)


def _devices(s: Strategy, c: ResolvedConfig) -> int:
    """The ranks that the machines carry, where the slots are more."""
    most = c.accelerator.max_ranks * c.machines  # one rank a GPU; at most four ranks a CPU core
    return most if s.slots > most else 0


def _bubble(s: Strategy) -> tuple[float, float] | None:
    """The bubble in %, and that of four micro-batches a stage, where there is less than one a stage."""
    if s.accumulation >= s.pipe_parallel_size or s.pipeline.problem():
        return None
    return 100 * s.bubble, 100 * replace(s, accumulation=4 * s.pipe_parallel_size).bubble


def _not_fp16(s: Strategy, c: ResolvedConfig) -> str:
    """What gradients are reduced in, where that is not fp16; by default what the model computes in."""
    kind = DTYPES.get(str(at(c, "communication_data_type")).lower(), s.precision)
    return "" if kind == "fp16" else kind


def _of(section: str, names: Iterable[str]) -> str:
    return " ".join(f"{section}.{name}" for name in names)


# What hyperparameters of a pipeline say where there is none.
WITHOUT_A_PIPELINE = (None, AUTO, False, ONE_F_ONE_B)

# fmt: off
TABLE = (
    # ---- pipelines
    row("pipeline-zero-stage", f"{ZERO}.stage", lambda s, c, v: s.pipe_parallel_size > 1 and s.zero_stage > 1,
        "a pipeline (pipe_parallel_size {s.pipe_parallel_size}) runs with ZeRO stage 0 or 1 only, not {s.zero_stage}",
        "set zero_optimization.stage to 1, or pipe_parallel_size to 1"),  # runtime/pipe/engine.py PipelineEngine
    row("pipeline-fp16-stage", "fp16.enabled", lambda s, c, v: s.pipe_parallel_size > 1 and v and s.zero_stage == 0,
        "without ZeRO a pipeline does not scale its fp16 loss, and divides the gradients by the scale",
        "set zero_optimization.stage to 1, or pipe_parallel_size to 1, or use bf16"),  # runtime/engine.py backward
    row("more-ranks-than-devices", "slots_per_trial", lambda s, c, v: _devices(s, c),
        "{s.slots} slots on a machine that carries {found} ranks", "use --slots {found} or fewer"),
    row("pipe-schedule", f"{HP}.pipe_schedule",  # arXiv 2104.04473, section 2.2; chunks are refused where they are read
        lambda s, c, v: s.pipe_parallel_size > 1 and not chunks_problem(s.pipe_schedule, s.pipe_chunks)
            and s.pipeline.problem(),
        "{found}, with pipe_parallel_size {s.pipe_parallel_size}",
        "change micro_batch_size or global_batch_size, or take pipe_schedule: 1f1b"),
    row("pipe-schedule-partitioned", "pipeline.pipe_partitioned pipeline.grad_partitioned",
        lambda s, c, v: s.pipe_parallel_size > 1 and s.pipe_schedule != ONE_F_ONE_B and v,  # runtime/pipe/dualpipev.py
        "{s.pipe_schedule} sends whole activations and gradients", "remove it, or take pipe_schedule: 1f1b"),
    row("zb-h1", f"{HP}.pipe_schedule", lambda s, c, v: s.pipe_parallel_size > 1 and s.pipe_schedule == ZB_H1
            and (s.activation_checkpointing or s.torch_compile or s.deepcompile),
        "zb-h1 goes through a layer's backward pass in two parts: activation checkpointing would compute the layer anew"
        " for each, and the backward pass of a compiled layer has no parts",  # CheckpointFunction.backward
        "take another pipe_schedule, or no activation checkpointing and no compiler"),
    row("one-stage", _of(HP, ("pipe_schedule", "partition_method", "pipe_within_machine")),
        lambda s, c, v: s.pipe_parallel_size == 1 and v not in WITHOUT_A_PIPELINE,
        "has no effect: there is one stage", "set pipe_parallel_size to 2 or more, or remove {key}", warning=True),
    row("partition-measured", f"{HP}.partition_method",  # our trial/pipeline.py
        lambda s, c, v: s.pipe_parallel_size > 1 and v == MEASURED and s.model_parallel_size > 1,
        "one rank measures a layer, and with model_parallel_size {s.model_parallel_size} several compute it together",
        "use parameters, uniform or type:REGEX"),
    row("pipeline-bubble", "gradient_accumulation_steps", lambda s, c, v: _bubble(s),  # our pipe/timeline.py
        "{value} micro-batches for {s.pipe_parallel_size} stages: by {s.pipe_schedule} each waits {found[0]:.0f} % of"
        " the time", "use more: 4 x {s.pipe_parallel_size} leave a bubble of {found[1]:.0f} %", warning=True),
    # ---- shared: what ranks that share a sequence (Ulysses), a layer (AutoTP) or experts (AutoEP) cannot do
    row("sequence-alone", f"{HP}.sequence_parallel_size",  # runtime/sequence_parallel/parallel_state_sp.py
        lambda s, c, v: s.sequence_parallel_size > 1 and (s.pipe_parallel_size > 1 or s.model_parallel_size > 1),
        "DeepSpeed's groups of sequences are made of all ranks: not beside pipe_parallel_size {s.pipe_parallel_size}"
        " and model_parallel_size {s.model_parallel_size}", "set sequence_parallel_size to 1, or both others"),
    row("sequence-degree", "sequence_parallel_size", lambda s, c, v: (v or 1) not in (1, s.sequence_parallel_size),
        "DeepSpeed would count replicas by it, and hyperparameters.sequence_parallel_size is"  # __init__.py initialize
        " {s.sequence_parallel_size}", "write hyperparameters.sequence_parallel_size, and remove it from the JSON"),
    row("zeropp-groups", f"{ZERO}.{HPZ}",  # runtime/comm/coalesced_collectives.py all_to_all_quant_reduce
        lambda s, c, v: s.zeropp and (s.sequence_parallel_size > 1 or _autotp(c) > 1 or _experts(c)),
        "ZeRO++ averages over its own groups of all ranks, and those that share a sequence, layers or experts hold"
        " different parts", "remove zero_hpz_partition_size and the zero_quantized_ keys, or do not share them"),
    row("deepcompile-shared", "compile.deepcompile",  # compile/passes/sp_compile.py
        lambda s, c, v: s.deepcompile and (s.sequence_parallel_size > 1 or _experts(c)),
        "DeepCompile shards sequences by passes of its own, and takes the model as one graph, in which experts cannot"
        " exchange tokens", "set compile.deepcompile to false"),
    row("model-parallel-degree", "tensor_parallel.autotp_size",  # __init__.py initialize
        lambda s, c, v: _autotp(c) not in (1, s.model_parallel_size),
        "differs from hyperparameters.model_parallel_size = {s.model_parallel_size}: ranks would share a replica that"
        " this counts as several, each with its own data",
        'set hyperparameters.model_parallel_size to the same, or write "auto" here'),
    row("tensor-pipeline", "tensor_parallel.autotp_size", lambda s, c, v: s.pipe_parallel_size > 1 and _autotp(c) > 1,
        "AutoTP replaces the groups of a pipeline by its own, of neighbouring ranks whatever their stage: the stages"
        " then wait for each other for ever",  # runtime/engine.py _configure_tensor_parallel_states; measured
        "set pipe_parallel_size to 1; or remove it, and build layers that cut themselves"),
    row("tensor-head", "tensor_parallel.vocab_parallel_lm_head", lambda s, c, v: v is True and _autotp(c) > 1,
        "the model returns each rank its own part of the logits: a loss of the trial's own from them is wrong",
        "remove it, unless the trial takes the loss that the model computes (model(..., labels=...).loss)",
        warning=True),  # sequence/cross_entropy.py configure_vocab_parallel_loss
    row("expert-degree", f"{HP}.expert_parallel_size",  # runtime/engine.py _configure_expert_parallel
        lambda s, c, v: type(v) is int and v != _experts(c) and str(_experts(c)),
        "differs from expert_parallel of the DeepSpeed JSON, which is {found} (0: not enabled)", "keep one of them"),
    row("expert-replicas", "expert_parallel.autoep_size",  # utils/groups.py _create_expert_and_data_parallel
        lambda s, c, v: _experts(c) > 1 and s.replicas == s.slots and s.replicas % _experts(c),
        "{s.replicas} replicas cannot be divided into groups of {value}",
        "use an expert_parallel_size that divides the replicas"),
    row("expert-alone", "expert_parallel.autoep_size", lambda s, c, v: _experts(c) and s.replicas != s.slots,
        "experts are shared beside no pipeline, model_parallel_size or sequence_parallel_size",
        "remove expert_parallel_size, or set the others to 1"),  # our trial/divided.py
    row("expert-precision", f"{ZERO}.stage",  # runtime/fp16/unfused_optimizer.py FP16_UnfusedOptimizer.step
        lambda s, c, v: s.zero_stage == 0 and s.precision != "fp32" and _experts(c),
        "without ZeRO, the norm by which gradients of {s.precision} are clipped leaves out those of the experts",
        "set zero_optimization.stage to 1, 2 or 3"),
    row("expert-gradients", _of(ZERO, ("contiguous_gradients", "reduce_scatter")),  # stage_1_and_2.py; losses measured
        lambda s, c, v: v is False and s.zero_stage in (1, 2) and not s.uses_bf16_optimizer and _experts(c),
        "without it, gradients of experts come out wrong under ZeRO 1, or DeepSpeed refuses them", "remove {key}"),
    # ---- states: what each ZeRO stage can offload and leave out
    row("offload-param-stage", f"{ZERO}.offload_param", lambda s, c, v: s.offload_param and s.zero_stage != 3,
        "parameters can be offloaded only where they are partitioned: ZeRO stage 3, not {s.zero_stage}",
        "set zero_optimization.stage to 3, or remove offload_param"),  # runtime/zero/offload_config.py
    row("offload-optimizer-stage", f"{ZERO}.offload_optimizer",  # stage_1_and_2.py (older texts say 2 and 3), stage3.py
        lambda s, c, v: s.offload_optimizer and s.zero_stage < (3 if s.offload_optimizer == "nvme" else 1),
        "the optimizer can be offloaded to the CPU from ZeRO stage 1 on, and to nvme at stage 3, not at {s.zero_stage}",
        "set zero_optimization.stage to such a stage, or remove offload_optimizer"),
    row("offload-nvme-path", f"{ZERO}.offload_optimizer {ZERO}.offload_param",  # runtime/zero/offload_config.py
        lambda s, c, v: v and v.get("device") == "nvme" and not v.get("nvme_path"),
        "offload to nvme needs a path to put the files", "add zero_optimization.{key}.nvme_path"),
    row("zenflow-batch", f"{ZERO}.zenflow", lambda s, c, v: v is not None,  # zenflow/engine.py configure_zenflow
        "ZenFlow steps after every micro-batch and sets gradient_accumulation_steps to its update_interval: a step"
        " would not be a global batch", "remove zenflow; offload_optimizer alone keeps the batch"),
    # ---- precision: what is computed and kept in 16 bits
    row("fp16-and-bf16", "fp16.enabled", lambda s, c, v: v and at(c, "bf16.enabled"),  # runtime/config.py
        "fp16 and bf16 exclude each other, and both are enabled", "disable one of them"),
    row("fp16-unsupported", "fp16.enabled", lambda s, c, v: v and not c.accelerator.fp16,  # _do_sanity_check
        "this accelerator does not train in fp16", 'set fp16.enabled to "auto" or false, or bf16.enabled to true'),
    # ---- communication
    row("zeropp-stage", _of(ZERO, (HPZ, *QUANTIZED)),  # runtime/zero/stage3.py; ZeRO++, arXiv 2306.10209
        lambda s, c, v: s.zero_stage != 3 and v and (v is True or v > 1),
        "ZeRO++ needs ZeRO stage 3, not {s.zero_stage}", "set zero_optimization.stage to 3, or remove {key}"),
    row("zeropp-hpz-size", f"{ZERO}.{HPZ}",  # utils/groups.py _create_zero_param_parallel_group
        lambda s, c, v: s.hpz_partition_size > 1 and s.slots % min(s.hpz_partition_size, s.slots),
        "{s.slots} slots cannot be split into secondary partitions of {s.hpz_partition_size}",
        "use a zero_hpz_partition_size that divides the slots (usually the GPUs of one node)"),
    row("zeropp-quantized-cuda", _of(ZERO, QUANTIZED), lambda s, c, v: c.accelerator.name != "cuda" and v,
        "ZeRO++ quantization runs in CUDA kernels, and there is no CUDA device",
        "run it on GPUs, or set {key} to false"),  # ops/op_builder/cpu/no_impl.py NotImplementedBuilder
    row("zeropp-gradients-machines", f"{ZERO}.zero_quantized_gradients",  # runtime/comm/coalesced_collectives.py
        lambda s, c, v: c.machines > 1 and v and _not_fp16(s, c),
        "on several machines the kernel reads gradients as fp16, and these are {found}: it would train on other"
        " numbers", 'add "communication_data_type": "fp16", or set zero_quantized_gradients to false'),
    # ---- optimizers
    row("zero-untested-optimizer", "optimizer.type",  # runtime/engine.py _do_optimizer_sanity_check
        lambda s, c, v: s.zero_stage > 0 and optimizer(c) not in ("", *ZERO_OPTIMIZERS)
            and not at(c, "zero_allow_untested_optimizer"),
        "ZeRO stage {s.zero_stage} takes Adam, AdamW, Adagrad, Lion and Muon, and refuses {value}",
        'use AdamW, set zero_optimization.stage to 0, or add "zero_allow_untested_optimizer": true'),
    row("torch-schedule", "scheduler.type",  # runtime/engine.py _scheduler_from_config is given the wrapped optimizer
        lambda s, c, v: v in TORCH_TYPES["scheduler"]
            and (s.zero_stage > 0 or at(c, "bf16.enabled") or at(c, "fp16.enabled")),
        "DeepSpeed wraps the optimizer for ZeRO, bf16 and fp16, and torch's schedules refuse a wrapped one",
        "return it from build_scheduler and remove the scheduler here, or use WarmupLR, WarmupDecayLR, WarmupCosineLR"
        " or OneCycle"),
    row("optimizer-nvcc", "optimizer.type", lambda s, c, v: compiles_optimizer(s, c),  # ops/adam/fused_adam.py
        "DeepSpeed's own {value} is compiled by nvcc before the first step, on every machine",
        "use an image with the CUDA toolkit, or AdamW with torch_adam and fused left out, which takes torch's",
        warning=True),
    row("muon-reduce-scatter", f"{ZERO}.reduce_scatter",  # runtime/zero/stage3.py DeepSpeedZeroOptimizer_Stage3
        lambda s, c, v: s.zero_stage == 3 and optimizer(c) == "muon" and v is not False,
        "Muon needs the whole gradient of a matrix, which ZeRO 3 hands out in parts",
        "add zero_optimization.reduce_scatter: false, or set zero_optimization.stage to 2"),
    row("muon-clipping", "gradient_clipping",  # runtime/zero/stage_1_and_2.py step; our tests/trial/test_muon.py
        lambda s, c, v: s.zero_stage > 0 and optimizer(c) == "muon" and not s.uses_bf16_optimizer and v,
        "under ZeRO it clips Muon's updates, which are of a fixed size, and not the gradients: steps become many times"
        " smaller than without ZeRO", "set gradient_clipping to 0", warning=True),
    row("muon-rates", "scheduler.params.warmup_max_lr",  # runtime/lr_schedules.py WarmupLR._format_param
        lambda s, c, v: optimizer(c) == "muon" and isinstance(v, (int, float))
            and any(at(c, f"optimizer.params.{name}") is not None for name in ("muon_lr", "adam_lr")),
        "the schedule gives all parameters this rate: muon_lr and adam_lr have no effect",
        "write a list, a rate for each parameter group: of each group its matrices, then the rest; in"
        " a pipeline, whose stages have different groups, leave muon_lr and adam_lr out"),
    row("muon-bf16-pipeline", "data_types.grad_accum_dtype",  # runtime/bf16_optimizer.py BF16_Optimizer.__init__
        lambda s, c, v: optimizer(c) == "muon" and s.uses_bf16_optimizer and (s.slots > s.replicas or _experts(c)),
        "DeepSpeed steps this by its BF16_Optimizer, which takes Muon of plain replicas only: in no pipeline, and of no"
        " ranks that share sequences, layers or experts",
        "set zero_optimization.stage to 1 and data_types.grad_accum_dtype to bf16, or use AdamW"),
    # ---- execution
    row("gpus-only", "activation_checkpointing.cpu_checkpointing compile.deepcompile",  # compile/util.py
        lambda s, c, v: c.accelerator.name == "cpu" and v, "is for GPUs, and DeepSpeed fails without them",
        "run it on GPUs, or set {key} to false"),
    row("pipeline-timers", "wall_clock_breakdown flops_profiler.enabled",  # runtime/pipe/engine.py PipelineEngine
        lambda s, c, v: s.pipe_parallel_size > 1 and v, "DeepSpeed starts a timer of a pipeline twice, and fails",
        "remove it: det-ds profile takes a step apart"),
    # ---- DeepSpeed's own monitors
    row("logger-secret", "comet.api_key", lambda s, c, v: v is not None,
        "is a secret, which would be written to the run's files",
        "remove it, and set COMET_API_KEY in the environment; a key that others have seen should be revoked"),
    row("monitor", "wandb.enabled", lambda s, c, v: v is True,  # monitor/wandb.py
        "has DeepSpeed open a run of its own in Weights & Biases at every start, without validations, whose steps are"
        " samples", f"write {HP}.{LOGGING}: {{{{wandb: {{{{}}}}}}}} instead, which continues one run", warning=True),
)
# fmt: on
RULES: tuple[Rule, ...] = tuple(rule for rules in TABLE for rule in rules)
