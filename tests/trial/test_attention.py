"""``sdpa_kernel``: torch's attention kernel by name, the same numbers by another way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.hyperparameters import SDPA_KERNELS, parse_hyperparameters
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError
from tests.ranks import Ranks

DS: dict[str, Any] = {
    "zero_optimization": {"stage": 0},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
}


def hyperparameters(**more: Any) -> dict[str, Any]:
    return {"global_batch_size": 4, "deepspeed_config": DS, **more}


def kernels_of(run_dir: Path, asked: list[str | None]) -> list[tuple[list[str], float]]:
    """In a rank: for each kernel asked for, in one process, what attention ran, and the loss after a step."""
    import torch
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode

    from determined_ds import DataParallelTrial, open_context

    class Ran(TorchDispatchMode):
        names: list[str]

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if "attention" in func.__name__ or "bmm" in func.__name__:
                self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    class Attending(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            torch.manual_seed(0)
            return torch.nn.Linear(8, 24)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            query, key, value = model(batch).unsqueeze(1).chunk(3, dim=-1)
            mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            return mixed.square().mean()

        def build_training_data_loader(self) -> Any:
            return self.training_loader(torch.linspace(-1, 1, 4 * 5 * 8).reshape(4, 5, 8))

        def build_validation_data_loader(self) -> Any:
            return self.build_training_data_loader()

    found = []
    for number, kernel in enumerate(asked):
        more = {} if kernel is None else {"sdpa_kernel": kernel}
        folder = run_dir / str(number)
        with open_context(hparams=hyperparameters(**more), run_dir=folder, accelerator="cpu") as context:
            trial = Attending(context)
            batches = torch.linspace(-1, 1, 4 * 5 * 8).reshape(4, 5, 8)
            ran = Ran()
            ran.names = []
            with ran:
                trial.train_batch(iter([batches]), 0, 0)
            loss = trial.train_batch(iter([batches]), 0, 1)["loss"]
            found.append((ran.names, float(loss)))
    return found


def test_it_is_the_kernel_that_computes(one_rank: Ranks, tmp_path: Path) -> None:
    """One after another in one process: what is not asked for again is torch's own choice again."""
    [found] = one_rank.run(kernels_of, tmp_path, [None, "math", None, "flash"])
    names = [names for names, _ in found]
    fused = [any("flash" in name for name in each) for each in names]
    assert fused == [True, False, True, True]
    assert any("bmm" in name for name in names[1])
    losses = [loss for _, loss in found]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)


@pytest.mark.parametrize("value", [*SDPA_KERNELS, "auto", None])
def test_names(value: str | None) -> None:
    document = Document(
        name="hyperparameters", data=hyperparameters(sdpa_kernel=value), prefix="hyperparameters"
    )
    assert parse_hyperparameters(document).sdpa_kernel == (None if value in (None, "auto") else value)


@pytest.mark.parametrize("value", ["maths", True, 1, ["math"]])
def test_another_is_refused(value: object) -> None:
    document = Document(
        name="hyperparameters", data=hyperparameters(sdpa_kernel=value), prefix="hyperparameters"
    )
    with pytest.raises(
        ConfigError, match=r"hyperparameters.sdpa_kernel = .*\n.*flash, efficient, cudnn, math"
    ):
        parse_hyperparameters(document)
