"""Activation checkpointing of the drivable-space transformer is DeepSpeed's, as its JSON configures it."""

from __future__ import annotations

from typing import Any

from tests.harness.ranks import Ranks

TINY = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2}
LAYERS = dict.fromkeys(("spatial_layers", "cross_view_layers", "temporal_layers"), 1)


def options_of_checkpointing(ds_config: dict[str, Any]) -> dict[str, Any]:
    """How many blocks were run by DeepSpeed's checkpointing, with which of its options, and whether it is exact."""
    import deepspeed
    import torch
    from deepspeed.runtime.activation_checkpointing import checkpointing

    from model_defs.drivable_vit.model import DrivableViT, model_config

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
    config, calls, gradients = model_config({**TINY, **LAYERS}), [], []
    for checkpoint in (None, deepspeed.checkpointing.checkpoint):
        model = DrivableViT(config, checkpoint=checkpoint)
        if checkpoint:
            for block in (*model.spatial, *model.cross_view, *model.temporal):
                block.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
        model(torch.ones(1, 1, 1, 3, 16, 16)).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    same = all(torch.equal(one, two) for one, two in zip(*gradients, strict=True))
    options = {"synchronize": checkpointing.SYNCHRONIZE, "cpu": checkpointing.CPU_CHECKPOINT}
    return {**options, "calls": calls, "same gradients": same}


def test_activation_checkpointing_is_that_of_the_json_and_changes_no_gradient(one_rank: Ranks) -> None:
    section = {"synchronize_checkpoint_boundary": True}
    ds_config = {"train_batch_size": 1, "activation_checkpointing": section}
    found = one_rank.run(options_of_checkpointing, ds_config)[0]
    # Each of three blocks once without a graph, and once more on the way back.
    calls = [False] * 3 + [True] * 3
    assert found == {"synchronize": True, "cpu": False, "calls": calls, "same gradients": True}
