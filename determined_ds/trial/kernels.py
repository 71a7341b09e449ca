"""How a model is computed: torch's compiler, activations computed again."""

from __future__ import annotations

import functools
from typing import Any

import deepspeed
import torch

from determined_ds.pipe.orders import ZB_H1
from determined_ds.trial.pipeline_module import ScheduledModule

# Key of the JSON's ``activation_checkpointing`` -> argument of DeepSpeed's function.
CHECKPOINTING = {
    "partition_activations": "partition_activations",
    "contiguous_memory_optimization": "contiguous_checkpointing",
    "number_checkpoints": "num_checkpoints",
    "cpu_checkpointing": "checkpoint_in_cpu",
    "synchronize_checkpoint_boundary": "synchronize",
    "profile": "profile",
}


def compile_engine(engine: Any) -> None:
    """Have an engine compile its model at its first forward pass, which then takes seconds to minutes.

    A pipeline compiles layer by layer. ZeRO stage 3 fetches parameters between layers, which cuts the model into
    pieces: it runs, takes longest to compile, and gains little.

    Source: ``DeepSpeedEngine.compile`` and ``PipelineModule.compile`` in deepspeed 0.19.8; in torch 2.13
    ``donated_buffer`` of ``_functorch/config.py`` and ``_TorchDynamoContext.__call__`` of ``_dynamo/eval_frame.py``.
    """
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


def configure_checkpointing(ds_config: dict[str, Any]) -> None:
    """Pass the JSON's ``activation_checkpointing`` to ``deepspeed.checkpointing``, which no engine does.

    Option by option: with the whole JSON, it would check the batch as if every rank were a replica.

    Source: ``configure`` in deepspeed 0.19.8's ``runtime/activation_checkpointing/checkpointing.py``.
    """
    if section := ds_config.get("activation_checkpointing"):
        options = {name: section[key] for key, name in CHECKPOINTING.items() if key in section}
        deepspeed.checkpointing.configure(None, **options)
