"""A script whose ranks share sequences: a group is given the same samples; an engine without its groups is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.harness.ranks import Ranks

DS = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
HPARAMS = {
    "global_batch_size": 4,
    "sequence_parallel_size": 2,
    "deepspeed_config": DS,
    "fit": {"max_length": {"batches": 3}},
}


def script(run_dir: str, made_with_groups: bool) -> list[Any]:
    """In a rank: the samples that it was given."""
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import determined_ds

    seen: list[Any] = []
    with determined_ds.session(HPARAMS, run_dir=run_dir, accelerator="cpu") as s:
        if made_with_groups:
            parallel_state_sp.initialize_sequence_parallel(2)
        unit = parallel_state_sp if made_with_groups else None
        model = torch.nn.Linear(1, 1)
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), mpu=unit, config=s.ds_config
        )
        s.checkpoint(engine)
        for (numbers,) in s.loader(torch.utils.data.TensorDataset(torch.arange(48.0).view(24, 2))):
            seen += numbers[:, 0].tolist()
            own = numbers.chunk(2, dim=1)[parallel_state_sp.get_sequence_parallel_rank()]
            engine.backward(engine(own / 48).square().sum() / numbers.numel())
            engine.step()
    return seen


def with_and_without(folder: str) -> tuple[str, list[Any]]:
    """In a rank: what is said where the engine has no groups, and the samples where it has them."""
    said = ""
    try:
        script(f"{folder}/without", False)
    except Exception as error:
        said = str(error)
    return said, script(f"{folder}/with", True)


def test_a_group_is_one_replica(two_ranks: Ranks, tmp_path: Path) -> None:
    (said, first), (_, second) = two_ranks.run(with_and_without, str(tmp_path))
    assert "deepspeed.initialize(mpu=...)" in said
    assert first == second
    assert len(first) == 12
