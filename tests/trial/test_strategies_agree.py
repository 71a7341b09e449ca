"""A strategy changes nothing of what is computed: GPT-2's losses and norms are those of plain PyTorch.

Clipping bites, there is more than one epoch, and the validation data divides neither by ranks nor by micro-batches.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from tests.harness.ranks import ROOT, Ranks, RanksOf
from tests.package import records, training_data
from tests.trial import regression
from tests.trial.regression import GLOBAL_BATCH_SIZE

STEPS = 20
SEQUENCE_LENGTH = 32
LEARNING_RATE, WARMUP_STEPS, WEIGHT_DECAY, CLIPPING, SEED = 0.003, 10, 0.01, 1.0, 5
# Relative. fp32 sums in another order differ by about 1e-6 of a loss.
TOLERANCE = 1e-4
OF_SLICES = 1e-5


class Strategy(NamedTuple):
    """How a run is shared out: the ranks, the ZeRO stage or the DeepSpeed JSON, and how each replica's batch is cut."""

    num_ranks: int
    deepspeed_config: str
    accumulation: int = 1
    stages: int = 1
    sequence: int = 1
    overwrites: dict[str, Any] = {}  # noqa: RUF012 — of the DeepSpeed JSON
    engine: str = "deepspeed"
    compiled: bool = False


STRATEGIES = {
    "one rank, micro-batch 1": Strategy(1, "zero1", accumulation=8),
    "ddp": Strategy(2, "zero0", accumulation=2, engine="ddp"),
    "ZeRO 0, accumulation 2": Strategy(2, "zero0", accumulation=2),
    "ZeRO 1, micro-batch 1": Strategy(2, "zero1", accumulation=4),
    "ZeRO 2, accumulation 2": Strategy(2, "zero2", accumulation=2),
    "ZeRO 3, accumulation 2": Strategy(2, "zero3", accumulation=2),
    "ZeRO 1, compiled": Strategy(2, "zero1", compiled=True),
    "ddp, compiled": Strategy(2, "zero0", engine="ddp", compiled=True),
    "pipeline, compiled": Strategy(2, "pipeline", accumulation=4, stages=2, compiled=True),
    "pipeline, ZeRO 1": Strategy(2, "zero1", accumulation=4, stages=2),
    "sequence 2, ZeRO 0": Strategy(2, "zero0", sequence=2),
    "sequence 2, ZeRO 2, accumulation 2": Strategy(2, "zero2", accumulation=2, sequence=2),
    "sequence 2, ZeRO 3": Strategy(2, "zero3", sequence=2),
    "sequence 2, ZeRO 3, no reduce_scatter": Strategy(
        2, "zero3", sequence=2, overwrites={"zero_optimization": {"reduce_scatter": False}}
    ),
    "sequence 2, ZeRO 3, all offloaded": Strategy(2, "zero3_offload", sequence=2),
    "sequence 2, prescaled": Strategy(2, "zero0", sequence=2, overwrites={"prescale_gradients": True}),
    "sequence 2 x data 2, ZeRO 1, accumulation 2": Strategy(4, "zero1", accumulation=2, sequence=2),
    "sequence 2 x data 2, ZeRO 3": Strategy(4, "zero3", sequence=2),
}


def hyperparameters(strategy: Strategy) -> dict[str, Any]:
    stage = re.fullmatch("zero([0-3])", strategy.deepspeed_config)
    return {
        "pipe_parallel_size": strategy.stages,
        "sequence_parallel_size": strategy.sequence,
        "deepspeed_config": f"experiments/deepspeed/{'zero1' if stage else strategy.deepspeed_config}.json",
        "zero_stage": int(stage[1]) if stage else None,
        "overwrite_deepspeed_args": {
            "gradient_accumulation_steps": strategy.accumulation,
            "gradient_clipping": CLIPPING,
            **strategy.overwrites,
        },
        "trial_seed": SEED,
        "torch_compile": strategy.compiled,
        "model_size": "tiny",
        "sequence_length": SEQUENCE_LENGTH,
        "dropout": 0.0,
        "learning_rate": LEARNING_RATE,
        "weight_decay": WEIGHT_DECAY,
        "warmup_num_steps": WARMUP_STEPS,
    }


def train(run_dir: Path, strategy: Strategy, data: dict[str, Any]) -> None:
    """Train in this rank."""
    from model_defs.gpt2.trial import GPT2PipelineTrial, GPT2Trial

    kind, given = GPT2PipelineTrial if strategy.stages > 1 else GPT2Trial, hyperparameters(strategy)
    fit = {"validation_period": ("batches", STEPS // 2), "checkpoint_policy": "none"}
    how = {"engine": strategy.engine, "exp_conf": {"data": data}}
    regression.train(run_dir, kind, given, steps=STEPS, **how, **fit)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A text of 14 global batches for training, and of 11 sequences for validation."""
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text((ROOT / "LICENSE").read_text()[:4100])
    return {"path": str(path), "validation_fraction": 0.09}


@pytest.fixture(scope="module")
def plain(data: dict[str, Any]) -> dict[str, list[float]]:
    """The same training in PyTorch alone, one whole batch at a time: metric -> its values."""
    from determined_ds import DataLoader
    from model_defs.common.text import load_text, next_token_loss
    from model_defs.gpt2.model import GPT2, Options, gpt2_config, load_initial_weights

    text = load_text(data, SEQUENCE_LENGTH)
    config = gpt2_config(Options(sequence_length=SEQUENCE_LENGTH), num_tokens=text.vocab_size)
    model = GPT2(config)
    load_initial_weights(model, config, SEED)
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in model.parameters() if p.ndim >= 2]},
            {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
        ],
        weight_decay=WEIGHT_DECAY,
    )
    loader = DataLoader(text.train, batch_size=GLOBAL_BATCH_SIZE, shuffle=True)
    stream = training_data(loader, (1, 1, GLOBAL_BATCH_SIZE), seed=SEED)
    assert stream.batches_per_epoch < STEPS, "the data is to be passed through more than once"
    assert len(text.validation) == 11, "a number that divides by no micro-batch size"
    found: dict[str, list[float]] = {"loss": [], "grad_norm": [], "lr": [], "validation_loss": []}
    for step in range(STEPS):
        inputs, targets = next(stream.batches)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        optimizer.zero_grad()
        loss = next_token_loss(model(inputs), targets)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
        assert norm > CLIPPING or step > STEPS // 2, "clipping is to bite"
        optimizer.step()
        found["loss"].append(loss.item())
        found["grad_norm"].append(norm.item())
        found["lr"].append(learning_rate(step + 1))  # of the next step
        if (step + 1) % (STEPS // 2) == 0:
            with torch.no_grad():
                samples = [text.validation[i] for i in range(11)]
                inputs, targets = (torch.stack(part) for part in zip(*samples, strict=True))
                found["validation_loss"].append(next_token_loss(model(inputs), targets).item())
    return found


def learning_rate(step: int) -> float:
    """DeepSpeed's ``WarmupLR``, linear: its first two steps are both at the lowest rate."""
    lowest = LEARNING_RATE / WARMUP_STEPS
    return lowest + (LEARNING_RATE - lowest) * min(1.0, max(0, step - 1) / WARMUP_STEPS)


@pytest.mark.parametrize("name", STRATEGIES)
def test_losses_and_norms_are_those_of_plain_pytorch(
    name: str, ranks_of: RanksOf, data: dict[str, Any], plain: dict[str, list[float]], tmp_path: Path
) -> None:
    """The gradients' norm before it is clipped too: clipping and Adam hide a gradient of another size."""
    strategy = STRATEGIES[name]
    ranks_of(strategy.num_ranks).run(train, tmp_path, strategy, data)
    tolerance = OF_SLICES if strategy.sequence > 1 else TOLERANCE
    for metric, expected in plain.items():
        group = "validation" if metric == "validation_loss" else "training"
        found = [metrics[metric] for _, metrics in records(tmp_path, group)]
        assert found == pytest.approx(expected, rel=TOLERANCE if metric == "grad_norm" else tolerance), metric


def ignored(run_dir: Path) -> tuple[float, float]:
    """In a rank: the mean over the tokens of its sequence that count, all in the second slice; its gradient."""
    import torch.distributed as dist

    from determined_ds import SequenceGroup, open_context

    hparams = {"global_batch_size": 1, "sequence_parallel_size": 2, "deepspeed_config": {}}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu"):
        sequence, weight = SequenceGroup(2), torch.ones(1, requires_grad=True)
        values, counts = sequence.cut(
            {"values": torch.arange(6.0)[None], "counts": torch.arange(6)[None] > 3}
        ).values()
        loss = sequence.mean((weight * values)[counts].sum(), counts.sum())
        loss.backward()
        dist.all_reduce(weight.grad)  # as DeepSpeed adds them up
        return loss.item(), float(weight.grad)


def test_labels_that_are_ignored_count_in_no_slice(two_ranks: Ranks, tmp_path: Path) -> None:
    """A slice may have none that counts: the mean is not that of the slices' means."""
    assert two_ranks.run(ignored, tmp_path) == [(4.5, 4.5)] * 2
