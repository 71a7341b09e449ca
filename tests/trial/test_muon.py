"""DeepSpeed's Muon: the same training under every ZeRO stage, as long as nothing is clipped; resumed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks, RanksFailed
from tests.runtime.checkpoints.strategies import run

STEPS = 6
ZERO = "zero_optimization"
PARAMS = {"lr": 0.02, "adam_lr": 0.001, "momentum": 0.95, "weight_decay": 0.01, "torch_adam": True}
MUON = {"type": "Muon", "params": PARAMS}
DS: dict[str, Any] = {"optimizer": MUON, "scheduler": {}, "gradient_clipping": 0.0}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {},
    "ZeRO 1": {ZERO: {"stage": 1}},
    "ZeRO 2": {ZERO: {"stage": 2}},
    "ZeRO 3": {ZERO: {"stage": 3, "reduce_scatter": False}},
    "ZeRO 0, clipped": {"gradient_clipping": 1.0},
    "ZeRO 1, clipped": {ZERO: {"stage": 1}, "gradient_clipping": 1.0},
}


class Small(torch.nn.Module):
    """Two matrices for Muon; the embedding, the head and the biases for Adam, by their names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.a, self.b = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.lm_head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embed(tokens)
        logits: torch.Tensor = self.lm_head(found + self.b(torch.tanh(self.a(found))))
        return logits


def losses(settings: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """In a rank: of each setting, the mean loss of every step."""
    import deepspeed
    import torch.distributed as dist

    from determined_ds.runtime.upstream import load_deepspeed

    load_deepspeed("cpu")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found: dict[str, list[float]] = {}
    for name, changes in settings.items():
        torch.manual_seed(0)
        model = Small()
        ds = {"train_micro_batch_size_per_gpu": 4, "optimizer": MUON, "gradient_clipping": 0.0, **changes}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)
        found[name] = []
        for step in range(STEPS):
            drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
            tokens = torch.randint(0, 32, (4, 9), generator=drawn)
            loss = torch.nn.functional.cross_entropy(
                engine(tokens).flatten(0, 1), ((tokens * 3 + 1) % 32).flatten()
            )
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found[name].append(total.item() / 2)
    return found


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks) -> dict[str, list[float]]:
    found: dict[str, list[float]] = two_ranks.run(losses, SETTINGS)[0]
    return found


@pytest.mark.parametrize("name", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 0, clipped"])
def test_the_same_losses(measured: dict[str, list[float]], name: str) -> None:
    """Clipping scales a gradient, which Muon does not look at; of Adam's part little is left to see."""
    assert measured[name] == pytest.approx(measured["ZeRO 0"], rel=1e-3 if "clipped" in name else 1e-5)


def test_under_zero_clipping_makes_steps_smaller(measured: dict[str, list[float]]) -> None:
    """Which the rule ``muon-clipping`` warns of: what is clipped there is the update."""
    learnt = {name: found[0] - found[-1] for name, found in measured.items()}
    assert learnt["ZeRO 1, clipped"] < learnt["ZeRO 1"] / 3


def of_stage(stage: int) -> dict[str, Any]:
    return {"zero": {"stage": stage, **({"reduce_scatter": False} if stage == 3 else {})}}


@pytest.mark.parametrize("stage", [1, 3])
def test_resumed(two_ranks: Ranks, tmp_path: Path, stage: int) -> None:
    """Bit for bit; under ZeRO 3 only to a rounding error, from the second step on."""
    strategy, saved = of_stage(stage), str(tmp_path / "a")
    whole = two_ranks.run(run, strategy, str(tmp_path), steps=5, **DS)
    first = two_ranks.run(run, strategy, str(tmp_path), write=saved, steps=3, **DS)
    rest = two_ranks.run(run, strategy, str(tmp_path), read=saved, first=3, steps=2, **DS)
    losses = first[0] + rest[0]
    assert losses[:4] == whole[0][:4]
    assert losses == (whole[0] if stage == 1 else pytest.approx(whole[0], rel=1e-5))


def resumed(ranks: Ranks, folder: Path, written: int, read: int, **how: Any) -> list[float]:
    """The losses of two steps under one stage after three under another."""
    saved = str(folder / f"zero{written}")
    if not Path(saved).exists():
        ranks.run(run, of_stage(written), str(folder), write=saved, steps=3, **DS)
    return list(ranks.run(run, of_stage(read), str(folder), read=saved, first=3, steps=2, **how, **DS)[0])


@pytest.mark.long("test_resumed holds what is resumed under the same stage")
@pytest.mark.parametrize(("written", "read"), [(0, 3), (3, 0)])
def test_resumed_under_another_stage(two_ranks: Ranks, tmp_path: Path, written: int, read: int) -> None:
    """With its momentum: without it the second step is another."""
    whole = two_ranks.run(run, of_stage(written), str(tmp_path), steps=5, **DS)[0]
    assert resumed(two_ranks, tmp_path, written, read) == pytest.approx(whole[3:], rel=1e-5)
    anew = resumed(two_ranks, tmp_path, written, read, reset_optimizer=True)
    assert anew[1] != pytest.approx(whole[4], rel=1e-4)


@pytest.mark.parametrize(("written", "read"), [(0, 1), (2, 0)])
def test_momentum_under_zero_1_and_2_stays_with_those_who_wrote_it(
    two_ranks: Ranks, tmp_path: Path, written: int, read: int
) -> None:
    with pytest.raises(RanksFailed, match="not cut along the parameters"):
        resumed(two_ranks, tmp_path, written, read)
