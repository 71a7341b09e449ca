"""Labels of -100 in slices of sequences: the mean is over the tokens of all slices that count, however they lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

from tests.harness.ranks import Ranks
from tests.trial.regression import trial_class

STEPS, SAMPLES, TOKENS, VOCABULARY, IGNORED = 20, 4, 12, 7, -100
# With so large an eps, Adam's steps grow with the gradient, as those of SGD do: a wrong mean is seen.
ADAM = {"lr": 1.0, "betas": [0.9, 0.99], "eps": 1.0, "weight_decay": 0.0}
LAYOUTS = {
    "sequence 2, ZeRO 1": (2, 2, 1),
    "sequence 2, ZeRO 3": (2, 2, 3),
    "sequence 2 x data 2, ZeRO 3": (4, 2, 3),
    "sequence 4, ZeRO 2": (4, 4, 2),
}  # ranks, of a sequence, ZeRO stage


def model() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, 8), torch.nn.Tanh(), torch.nn.Linear(8, VOCABULARY)
    )


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step: few labels count, and in some slices none."""
    drawn = torch.Generator().manual_seed(step)
    tokens_BT = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=drawn)
    labels_BT = (3 * tokens_BT + 1) % VOCABULARY
    labels_BT[torch.rand(SAMPLES, TOKENS, generator=drawn) < 0.6] = IGNORED
    labels_BT[:, : TOKENS // 4 * (step % 4)] = IGNORED
    labels_BT[:, -1] = 1
    return tokens_BT, labels_BT


def sliced(run_dir: Path, size: int, stage: int) -> list[float]:
    """In a rank: the mean loss of each step."""
    import torch.distributed as dist

    from determined_ds import open_context

    def loss(self: Any, model: Any, batch: Any) -> torch.Tensor:
        tokens_BT, labels_BT = batch
        logits = model(tokens_BT).flatten(0, 1)
        total = cross_entropy(logits, labels_BT.flatten(), ignore_index=IGNORED, reduction="sum")
        return self.sequence.mean(total, (labels_BT != IGNORED).sum())

    trial_of_slices = trial_class(sequence_parallel=True, build_model=lambda self: model(), loss=loss)
    optimizer = {"type": "Adam", "params": {**ADAM, "torch_adam": True}}
    ds_config = {"zero_optimization": {"stage": stage}, "optimizer": optimizer, "gradient_clipping": 0.0}
    hparams = {"global_batch_size": SAMPLES, "sequence_parallel_size": size, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_of_slices(context)
        replica, replicas = dist.get_rank() // size, dist.get_world_size() // size
        losses = []
        for step in range(STEPS):
            own = slice(replica * SAMPLES // replicas, (replica + 1) * SAMPLES // replicas)
            tokens_BT, labels_BT = (each[own] for each in batch(step))
            loss = trial.loss(trial.engine, trial.split_sequence((tokens_BT, labels_BT)))
            trial.engine.backward(loss)
            trial.engine.step()
            found = loss.detach().clone()
            dist.all_reduce(found)
            losses.append(float(found) / dist.get_world_size())
    return losses


def plain(replicas: int) -> list[float]:
    """Whole sequences in one process; each replica's mean counts alike."""
    whole, losses = model(), []
    optimizer = torch.optim.Adam(whole.parameters(), **ADAM)  # type: ignore[arg-type]
    for step in range(STEPS):
        pairs = zip(*(each.chunk(replicas) for each in batch(step)), strict=True)
        logits = ((whole(tokens).flatten(0, 1), labels.flatten()) for tokens, labels in pairs)
        loss = torch.stack([cross_entropy(*each, ignore_index=IGNORED) for each in logits]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
def test_losses_are_those_of_whole_sequences(
    layout: str, two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path
) -> None:
    ranks, size, stage = LAYOUTS[layout]
    expected = plain(ranks // size)
    assert expected[-1] < 0.9 * expected[0]
    for losses in (two_ranks if ranks == 2 else four_ranks).run(sliced, tmp_path, size, stage):
        assert losses == pytest.approx(expected, rel=1e-5)
