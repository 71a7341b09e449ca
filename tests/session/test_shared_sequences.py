"""A script whose ranks share sequences: a group is given the same samples; an engine without its groups is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks

DS = {"zero_optimization": {"stage": 3}, "optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}
HPARAMS = {
    "global_batch_size": 4,
    "sequence_parallel_size": 2,
    "deepspeed_config": DS,
    "fit": {"max_length": {"batches": 3}},
}


def script(run_dir: str, made_with_groups: bool) -> tuple[str, list[Any]]:
    """In a rank: the error, and the samples that it was given."""
    import deepspeed
    import torch
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    import determined_ds

    seen: list[Any] = []
    try:
        with determined_ds.session(HPARAMS, run_dir=run_dir, accelerator="cpu") as s:
            if made_with_groups:
                parallel_state_sp.initialize_sequence_parallel(2)
            unit = parallel_state_sp if made_with_groups else None
            model = torch.nn.Linear(1, 1)
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), mpu=unit, config=s.ds_config
            )
            dataset = torch.utils.data.TensorDataset(torch.arange(48.0).view(24, 2))
            s.checkpoint(engine)
            for (numbers,) in s.loader(dataset):
                seen += numbers[:, 0].tolist()
                own = numbers.chunk(2, dim=1)[parallel_state_sp.get_sequence_parallel_rank()]
                loss = engine(own / 48).square().sum() / numbers.numel()
                engine.backward(loss)
                engine.step()
                s.report({"loss": loss})
    except Exception as error:
        return f"{type(error).__name__}: {error}", seen
    return "", seen


@pytest.mark.parametrize("made_with_groups", [True, False])
def test_a_group_is_one_replica(made_with_groups: bool, two_ranks: Ranks, tmp_path: Path) -> None:
    (error, first), (_, second) = two_ranks.run(script, str(tmp_path / "run"), made_with_groups)
    if made_with_groups:
        assert error == ""
        assert first == second
        assert len(first) == 12
    else:
        assert "deepspeed.initialize(mpu=...)" in error
