"""DeepSpeed's engine: how it is made of a model, and corrected where deepspeed 0.19.8 trains on other numbers."""

from __future__ import annotations

import contextlib
import itertools
import pkgutil
import weakref
from collections.abc import Mapping
from functools import cache, partial
from importlib.metadata import version
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.fp16.fused_optimizer import FP16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.pipe.engine import TRAIN_BATCH_TIMER, PipelineEngine
from deepspeed.runtime.utils import clip_grad_norm_
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.utils.timer import NoopTimer

from determined_ds.documents.text import as_plain
from determined_ds.errors import ConfigError, Problem
from determined_ds.trial import divided
from determined_ds.trial.instruction_times import ATTRIBUTE, InstructionTimes
from determined_ds.trial.pipeline_engine import PlannedEngine, ScheduledModule
from determined_ds.trial.returned import refused

# Names that are replaced or overridden here, and that no version promises: of a module or a class.
AVERAGED = "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads"
PATCHED = {
    "deepspeed": "PipelineEngine set_optimizer_flags",
    "deepspeed.utils.groups": "_init_tp_mesh_device _get_expert_parallel_group",
    "deepspeed.runtime.compiler": "compile",
    "deepspeed.ops": "__compatible_ops__",
    "deepspeed.runtime.engine:DeepSpeedEngine": """_backward_prologue _backward_prologue_per_tensor backward scale
        _apply_autotp_partitioning _configure_expert_parallel _get_optimizer_loss_scale clip_fp32_gradients
        _scale_loss_by_gas""",
    "deepspeed.runtime.pipe.engine:PipelineEngine": """_INSTRUCTION_MAP _exec_schedule _send_tensor_meta
        _recv_tensor_meta _allocate_or_extend_buffers _exec_load_micro_batch _exec_forward_pass _exec_backward_pass
        _loss_stage_global_rank _train_schedule _inference_schedule""",
    "deepspeed.runtime.pipe.module:PipelineModule": """_partition_layers _build _set_bounds
        _precompute_checkpointable_values""",
    "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3": AVERAGED,
    "determined.pytorch.deepspeed:DeepSpeedTrialContext": "_init_device",
    "determined.core._checkpoint:CheckpointContext": "_report_checkpoint",
    "determined.core._metrics:_Shipper": "_post_metrics",
    "determined.core:DistributedContext": "_init_ipc",
    "determined.core._context": "init",
    "determined._info": "_info",
    "torch.distributed.distributed_c10d": """default_pg_timeout default_pg_nccl_timeout _set_pg_timeout
        _get_default_store""",
}
TESTED = {"deepspeed": "0.19.8", "determined": "0.38.1", "torch": "2.13.0"}
# Keys of the JSON's ``activation_checkpointing``, in the order of the arguments of deepspeed.checkpointing.configure.
CHECKPOINTING = (
    *("partition_activations", "contiguous_memory_optimization", "number_checkpoints", "cpu_checkpointing"),
    *("synchronize_checkpoint_boundary", "profile"),
)
EMBEDDINGS = (torch.nn.Embedding, torch.nn.EmbeddingBag)
# Of this process, those that are corrected, each while its trial holds it.
ENGINES: weakref.WeakSet[Any] = weakref.WeakSet()


@cache
def check_upstream() -> None:
    """Check that the installed versions have every name of :data:`PATCHED`: a correction must not vanish silently."""
    problems = []
    for place, names in PATCHED.items():
        owner = None
        with contextlib.suppress(ImportError, AttributeError):
            owner = pkgutil.resolve_name(place if ":" in place else f"{place}:")
        if lacking := [name for name in names.split() if not hasattr(owner, name)]:
            package = place.partition(".")[0]
            message = f"{place} has no {', '.join(lacking)}, which is replaced here: it would train on other numbers"
            fix, key = f"pip install {package}=={TESTED[package]}", f"{package} {version(package)}"
            problems.append(Problem(key=key, message=message, fix=fix, code="upstream-names"))
    if problems:
        raise ConfigError(problems)


def make_engine(model: Any, optimizer: Any, parameters: Any, ds_config: dict[str, Any], unit: Any) -> Any:
    """``deepspeed.initialize`` for a bare model that it may cut, in a pipeline of any schedule; a collective.

    ``parameters`` are trained by the JSON's optimizer, where the author has none. The mpu of tensor parallel takes the
    place of ``unit``. Returns the engine, corrected.
    """
    if (ds_config.get(divided.EXPERTS) or {}).get("enabled"):
        # By their names DeepSpeed takes experts out of groups: split_params_into_different_moe_groups_for_optimizer in
        # deepspeed 0.19.8's moe/utils.py.
        if optimizer is not None:
            message = "with expert parallel, DeepSpeed takes the experts out of groups that it makes itself"
            fix, value = "return None, and name an optimizer in the DeepSpeed JSON", type(optimizer).__name__
            raise refused("build_optimizer", message, fix, divided.EXPERTS, value=value)
        if parameters and isinstance(parameters[0], Mapping):
            parameters = [{"name": f"group {index}", **each} for index, each in enumerate(parameters)]
    own = {name: getattr(deepspeed, name) for name in ("PipelineEngine", "set_optimizer_flags")}
    # initialize takes both from its own names; it tags the parameters for Muon, and again those that AutoEP makes.
    if isinstance(model, ScheduledModule) and model.is_planned:
        deepspeed.PipelineEngine = PlannedEngine
    deepspeed.set_optimizer_flags = partial(_tag_for_muon, own["set_optimizer_flags"])
    try:
        with divided.carried_out(model, ds_config) as mpu:
            given = {"optimizer": optimizer, "model_parameters": parameters, "mpu": mpu or unit}
            engine, *_ = deepspeed.initialize(model=model, config=dict(ds_config), **given)
    finally:
        vars(deepspeed).update(own)
    fix_engine(engine)
    return engine


def _tag_for_muon(own: Any, config: Any, model: torch.nn.Module) -> None:
    """Say which parameters are Muon's, in place of DeepSpeed's ``own`` function.

    Muon is made for the matrices within a model; embeddings, heads and vectors are Adam's (Keller Jordan's Muon, in
    ``runtime/zero/muon/original_muon.py``). DeepSpeed goes by names, and takes GPT-2's ``wte`` and ``wpe`` for Muon's.
    Here embeddings go by their class and heads by what the model says, and a parameter's own ``use_muon`` decides.
    """
    stated = [(each, each.use_muon) for each in model.parameters() if hasattr(each, "use_muon")]
    own(config, model)
    if config.optimizer_name != "muon":
        return
    for module in model.modules():  # whole, or the layers of a pipeline's stage
        get_head = getattr(module, "get_output_embeddings", None)  # of a model of transformers
        head = get_head() if callable(get_head) else None
        left: list[Any] = [module] if isinstance(module, EMBEDDINGS) else []
        left += [head] if isinstance(head, torch.nn.Module) else []
        for parameter in itertools.chain.from_iterable(each.parameters() for each in left):
            parameter.use_muon = False
    for parameter, value in stated:
        parameter.use_muon = value


def compile_engine(engine: Any) -> None:
    """Have an engine compile its model at its first forward pass, which then takes seconds to minutes."""
    from torch._dynamo.external_utils import wrap_inline  # loading it takes seconds

    layers = getattr(engine.module, "forward_funcs", ())
    if isinstance(engine.module, ScheduledModule):
        layers = [layer for part in engine.module.functions.values() for layer in part]
    # torch skips functions of its own files: of a model that is torch's own, such as a Sequential of layers, nothing is
    # compiled, unless a frame that is not torch's is around it.
    for module in (engine.module, *layers):
        is_module = isinstance(module, torch.nn.Module) and "forward" not in vars(module)
        if is_module and type(module).forward.__module__.startswith("torch."):
            module.forward = wrap_inline(module.forward)
    engine.compile()


def fix_engine(engine: Any) -> None:
    """Correct what ``deepspeed.initialize`` returned; does nothing the second time, or with another kind of engine."""
    if not isinstance(engine, DeepSpeedEngine) or engine in ENGINES:
        return
    check_upstream()
    engine.config = as_plain(engine.config)  # checkpoints have it, where torch would not load an AttrDict
    if isinstance(engine, PipelineEngine):
        _fix_pipeline(engine)
    else:
        _scale_loss(engine)

    size, optimizer = engine.sequence_parallel_size, engine.optimizer
    if size > 1 and isinstance(optimizer, DeepSpeedZeroOptimizer_Stage3):
        # Ranks that share a sequence add up their gradients, and ZeRO 3 averages over them too: with clipping, or an
        # optimizer other than Adam, it would train otherwise than ZeRO 0, 1 and 2.
        averaged = getattr(optimizer, AVERAGED)
        setattr(optimizer, AVERAGED, lambda *args: [part.mul(size) for part in averaged(*args)])

    # Without ZeRO, an engine refuses any backward pass that it did not begin itself. One of another engine goes
    # through, as a generator's through its discriminator; the author clears the gradients that it leaves.
    prologue = engine._backward_prologue

    def backward_prologue() -> None:
        runs = [each for each in ENGINES if each._running_engine_backward]
        if engine._support_torch_style_backward or not runs or engine in runs:
            prologue()

    # The norm that clipping computes in fp32 without ZeRO, which the engine discards, is kept.
    has_experts = bool(divided.expert_layers(engine.module))

    def clip_fp32_gradients() -> None:
        parameters, limit = list(engine.module.parameters()), engine.gradient_clipping()
        clip = divided.clip_by_all_experts if has_experts else partial(clip_grad_norm_, mpu=engine.mpu)
        engine._global_grad_norm = clip(parameters, max_norm=limit)

    engine._backward_prologue, engine.clip_fp32_gradients = backward_prologue, clip_fp32_gradients
    ENGINES.add(engine)


def _fix_pipeline(engine: Any) -> None:
    """Clip by the gradient of all stages, refuse what a middle stage would misread, and time the instructions."""
    if not engine.steps_per_print():
        engine.timers.timers[TRAIN_BATCH_TIMER] = NoopTimer.Timer()  # it would keep a record of every batch
    if engine.grid.get_slice_parallel_world_size() == 1:
        # With neither ZeRO nor half precision, a parameter on another stage counts only if it is marked as one that no
        # other rank holds; copies of a tied weight count on one stage. Where slices share layers, the model marks them.
        for parameter in engine.module.parameters():
            parameter.model_parallel = not getattr(parameter, "ds_pipe_replicated", False)
    if engine.num_stages > 1:
        setattr(engine, ATTRIBUTE, InstructionTimes(engine))
    if engine.num_stages <= 2 or isinstance(engine, PlannedEngine):
        return
    send = type(engine)._send_tensor_meta

    def send_tensor_meta(buffer: Any, recv_stage: int) -> None:
        # A stage with neighbours on both sides receives activations and gradients in the same buffers, whose type is
        # that of the first.
        tensors = buffer if isinstance(buffer, tuple) else (buffer,)
        if dtypes := sorted({str(tensor.dtype) for tensor in tensors if not tensor.is_floating_point()}):
            stage, sent = engine.stage_id, ", ".join(dtypes)
            message = f"stage {stage} sends {sent}; through a middle stage only floats pass"
            fix = "make them on the stage that needs them, send them as floats, or use two stages"
            key, code = "hyperparameters.pipe_parallel_size", "pipeline-integers"
            raise refused(key, message, fix, code, value=engine.num_stages)
        send(engine, buffer, recv_stage)

    engine._send_tensor_meta = send_tensor_meta


def _scale_loss(engine: Any) -> None:
    """Scale the loss in fp16 without ZeRO: the engine divides the gradients by a scale that it never multiplied by.

    The norm of the unfused optimizer is of scaled gradients (``runtime/fp16/unfused_optimizer.py``), and is divided.
    """
    optimizer, kind, used = engine.optimizer, type(engine), 1.0
    if not engine.fp16_enabled() or not isinstance(optimizer, (FP16_Optimizer, FP16_UnfusedOptimizer)):
        return

    def scaled(loss: Any) -> Any:
        nonlocal used
        used = float(engine._get_optimizer_loss_scale())
        return loss.float() * used

    def get_global_grad_norm() -> Any:
        norm = kind.get_global_grad_norm(engine)
        return None if norm is None else norm / used

    engine.backward = lambda loss, *more, **how: kind.backward(engine, scaled(loss), *more, **how) / used
    engine.scale = lambda loss: kind.scale(engine, scaled(loss))
    if isinstance(optimizer, FP16_UnfusedOptimizer):
        engine.get_global_grad_norm = get_global_grad_norm
