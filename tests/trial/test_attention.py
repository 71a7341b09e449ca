"""``sdpa_kernel``: torch's attention kernel by name, the same numbers by another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks
from tests.trial.regression import trial_class


def kernels_of(run_dir: Path, asked: list[str | None]) -> list[tuple[list[str], float]]:
    """In a rank: for each kernel asked for, in one process, what attention ran, and the loss after a step."""
    import torch
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode

    from determined_ds import open_context

    ran: list[str] = []

    class Ran(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in func.__name__ or "bmm" in func.__name__:
                ran.append(func.__name__)
            return func(*args, **(kwargs or {}))

    def loss(self: Any, model: Any, batch: Any) -> torch.Tensor:
        query, key, value = model(batch).unsqueeze(1).chunk(3, dim=-1)
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True).square().mean()

    attending = trial_class(build_model=lambda self: torch.nn.Linear(8, 24), loss=loss)
    ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}
    found = []
    for number, kernel in enumerate(asked):
        hparams = {"global_batch_size": 4, "deepspeed_config": ds_config, "sdpa_kernel": kernel}
        with open_context(hparams=hparams, run_dir=run_dir / str(number), accelerator="cpu") as context:
            torch.manual_seed(0)
            trial = attending(context)
            batches = torch.linspace(-1, 1, 4 * 5 * 8).reshape(4, 5, 8)
            ran.clear()
            with Ran():
                trial.train_batch(iter([batches]), 0, 0)
            found.append(([*ran], float(trial.train_batch(iter([batches]), 0, 1)["loss"])))
    return found


def test_it_is_the_kernel_that_computes(one_rank: Ranks, tmp_path: Path) -> None:
    """One after another in one process: what is not asked for again is torch's own choice again."""
    [found] = one_rank.run(kernels_of, tmp_path, [None, "math", None, "flash"])
    fused = [any("flash" in name for name in names) for names, _ in found]
    assert fused == [True, False, True, True]
    assert any("bmm" in name for name in found[1][0])
    losses = [loss for _, loss in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
