"""How a model is computed: kernels of attention (``sdpa_kernel``), torch's compiler, activations computed again."""

from __future__ import annotations

import functools
import os
import shutil
import sysconfig
from pathlib import Path
from typing import Any

import deepspeed
import torch

from determined_ds.errors import ConfigError, Problem
from determined_ds.pipe.orders import ZB_H1
from determined_ds.trial.pipeline_module import ScheduledModule

_as_torch_chooses: list[bool] = []  # the switches before the first choice


def choose_sdpa_kernel(kernel: str | None) -> None:
    """Have torch compute attention by one kernel, and by ``math`` where that one cannot; None: as torch chooses.

    It holds for the whole process, also for code that is compiled in it. In half precision on a CPU torch chooses its
    fused kernel, whose backward pass is slower there than plain matrix products: ``math`` in bf16 made a step of GPT-2
    twice as fast (torch 2.13). It adds up in half precision, so compare the loss before using it.

    Source: ``torch.backends.cuda``, whose switches hold on CPUs too (``sdp_utils_cpp.cpp`` in torch 2.13).
    """
    cuda = torch.backends.cuda
    if kernel is None and not _as_torch_chooses:
        return
    if not _as_torch_chooses:
        enabled = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.cudnn_sdp_enabled()
        _as_torch_chooses.extend((*enabled, cuda.fp16_bf16_reduction_math_sdp_allowed()))
    chosen = [kernel == each for each in ("flash", "efficient", "cudnn", "math")]
    flash, efficient, cudnn, reduced = chosen if kernel else _as_torch_chooses
    cuda.enable_flash_sdp(flash)
    cuda.enable_mem_efficient_sdp(efficient)
    cuda.enable_cudnn_sdp(cudnn)
    cuda.allow_fp16_bf16_reduction_math_sdp(reduced)
    # Otherwise torch's cache returns for one kernel what was compiled with another.
    torch.compiler.config.cache_key_tag = f"sdpa {flash} {efficient} {cudnn} {reduced}"


# ------------------------------------------------------------------------------------------- torch.compile


def compile_engine(engine: Any, device: torch.device) -> None:
    """Have an engine compile its model at its first forward pass, which then takes seconds to minutes.

    A pipeline compiles layer by layer. ZeRO stage 3 fetches parameters between layers, which cuts the model into
    pieces: it runs, takes longest to compile, and gains little.

    Raises:
        ConfigError: this machine lacks a compiler, which torch would only find out in the first step.

    Source: ``DeepSpeedEngine.compile`` and ``PipelineModule.compile`` in deepspeed 0.19.8; in torch 2.13
    ``donated_buffer`` of ``_functorch/config.py`` and ``_TorchDynamoContext.__call__`` of ``_dynamo/eval_frame.py``.
    """
    if missing := missing_tools(device):
        message = f"torch.compile needs a compiler on this machine; missing: {', '.join(missing)}"
        fix = "install it (Debian and Ubuntu: apt install g++ python3-dev); or torch_compile: false"
        key = "hyperparameters.torch_compile"
        raise ConfigError(Problem(key=key, value=True, message=message, fix=fix, code="torch-compile"))
    layers = getattr(engine.module, "forward_funcs", ())
    if isinstance(engine.module, ScheduledModule):
        layers = [layer for part in engine.module.functions.values() for layer in part]
        if engine.module.pipe.schedule == ZB_H1:
            # Its backward pass goes through what is compiled twice; buffers that are given away are gone by then.
            torch._functorch.config.donated_buffer = False
    # torch compiles functions as Python comes to run them, and skips those of its own files; what they call of the
    # model's is compiled, each by itself. Where a model calls only torch's own, such as a Sequential of its layers,
    # nothing is. A function of ours around it is compiled with all that is in it.
    for module in (engine.module, *layers):
        is_module = isinstance(module, torch.nn.Module) and "forward" not in vars(module)
        if is_module and type(module).forward.__module__.startswith("torch."):

            @functools.wraps(module.forward)
            def in_own_frame(*inputs: Any, own: Any = module.forward, **kwargs: Any) -> Any:
                return own(*inputs, **kwargs)

            module.forward = in_own_frame
    engine.compile()


def missing_tools(device: torch.device) -> list[str]:
    """What torch.compile needs and does not find on this machine, in words.

    On a CPU, torch generates C++; on CUDA, code for Triton, whose kernels are started from C.

    Source: ``config.cpp.cxx`` in torch 2.13's ``_inductor/config.py``; ``_build`` in triton 3's ``runtime/build.py``.
    """
    kind, names = "C++ compiler", [os.environ.get("CXX") or "", "g++", "clang++"]
    if device.type == "cuda":
        kind, names = "C compiler", [os.environ.get("CC") or "", "gcc", "clang"]
    missing = [] if any(shutil.which(name) for name in names if name) else [f"{kind} ({names[1]})"]
    if not (Path(sysconfig.get_path("include")) / "Python.h").is_file():
        missing.append("Python.h, the headers of this Python")
    return missing


# ------------------------------------------------------------------------------------------ recomputation

# Key of the JSON's section -> argument of the function.
CHECKPOINTING = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


def configure_checkpointing(ds_config: dict[str, Any]) -> None:
    """Pass the JSON's ``activation_checkpointing`` to ``deepspeed.checkpointing``, which no engine does.

    Option by option: with the whole JSON, it would check the batch as if every rank were a replica.

    Source: ``configure`` in deepspeed 0.19.8's ``runtime/activation_checkpointing/checkpointing.py``.
    """
    section = ds_config.get("activation_checkpointing")
    if section:
        options = {name: section[key] for key, name in CHECKPOINTING.items() if key in section}
        deepspeed.checkpointing.configure(None, **options)
