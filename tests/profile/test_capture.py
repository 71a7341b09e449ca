"""Steps recorded in an ordinary training: it stays the same to the bit, and the parts add up to the loop's clock."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed
from tests.package import profile_of

PROFILE = {"wait": 2, "warmup": 1, "active": 3}
SAMPLES, TOKENS, LAYERS, WIDTH, WORDS = 2, 128, 2, 64, 256
# 6 x parameters in matrices x tokens, and 12 x layers x width x tokens x sequence length for attention.
TRANSFORMER = SAMPLES * TOKENS * (6 * (12 * LAYERS * WIDTH**2 + WORDS * WIDTH) + 12 * LAYERS * WIDTH * TOKENS)
# No gradient of the inputs.
LINEAR = 16 * 2 * (3 * (6 * 64 * 64 + 64 * 8) - 64 * 64)


def train(run_dir: Path, profile: Any, zero_stage: int = 1, case: str = "") -> Any:
    """Train 8 batches in this rank. Returns its losses, and what is left of the recording."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randn(256, 8))
    losses: list[float] = []

    def patched() -> list[Any]:
        return [getattr(DeepSpeedEngine, name) for name in ("forward", "backward", "step")]

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            layers = [torch.nn.Linear(64, 64) for _ in range(6)]
            return torch.nn.Sequential(*layers, torch.nn.Dropout(0.1), torch.nn.Linear(64, 8))

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            losses.append(float(metrics["loss"]))

        def loss(self, model: Any, batch: Any) -> Any:
            if case == "fails" and len(losses) == 4:
                raise ZeroDivisionError
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    ds_config = {
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": zero_stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
    }
    hparams = {"global_batch_size": 16, "deepspeed_config": ds_config}
    before = patched()
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        length = Batch(4 if case == "short" else 8)
        arguments = {"checkpoint_policy": "none", "validation_period": Batch(4), "profile": profile}
        Trainer(Mine(context), context).fit(max_length=length, **arguments)
    return losses, before == patched()


def assert_adds_up(profile: dict[str, Any]) -> None:
    """Parts against the clock of the loop: the median, as a rank may be put off between the two."""
    steps = [step for rank in profile["ranks"] for step in rank["steps"]]
    ratios = [sum(step["seconds"].values()) / step["clock_s"] for step in steps]
    assert statistics.median(ratios) == pytest.approx(1, abs=0.02)


def test_losses_are_those_of_a_training_that_is_not_recorded(one_rank: Ranks, tmp_path: Path) -> None:
    [(plain, _)] = one_rank.run(train, tmp_path / "plain", None)
    [(found, unpatched)] = one_rank.run(train, tmp_path / "profiled", PROFILE)
    assert found == plain
    assert unpatched
    assert not (tmp_path / "plain" / "profile").exists()
    profile = profile_of(tmp_path / "profiled")
    [rank] = profile["ranks"]
    assert [step["batch"] for step in rank["steps"]] == [4, 5, 6]
    assert_adds_up(profile)
    assert all(rank["seconds"][part] > 0 for part in ("data", "forward", "backward", "optimizer"))
    assert rank["seconds"]["pipeline"] == rank["seconds"]["idle"] == 0
    assert rank["flops"] == LINEAR
    assert 0 < profile["mfu"] < 1


def test_two_ranks_wait_for_their_collectives(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, tmp_path, PROFILE, 3)
    profile = profile_of(tmp_path)
    assert [rank["rank"] for rank in profile["ranks"]] == [0, 1]
    assert_adds_up(profile)
    assert all(rank["seconds"]["communication"] > 0 for rank in profile["ranks"])


def test_a_training_that_ends_or_fails_before_writes_the_whole_steps_it_has(
    one_rank: Ranks, tmp_path: Path
) -> None:
    one_rank.run(train, tmp_path / "short", PROFILE, 1, "short")
    with pytest.raises(RanksFailed, match="ZeroDivisionError"):
        one_rank.run(train, tmp_path / "fails", PROFILE, 1, "fails")
    for name in ("short", "fails"):
        assert [step["batch"] for step in profile_of(tmp_path / name)["ranks"][0]["steps"]] == [4]


# --------------------------------------------------------------------------------------- floating-point operations


def train_transformer(run_dir: Path, attention: str, dropout: float, recomputed: bool) -> None:
    """In a rank: GPT-2 of two layers, a sample a micro-batch."""
    import transformers
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            config = transformers.GPT2Config(
                n_layer=LAYERS,
                n_embd=WIDTH,
                n_head=4,
                vocab_size=WORDS,
                n_positions=TOKENS,
                attn_pdrop=dropout,
                attn_implementation=attention,
            )
            model = transformers.GPT2LMHeadModel(config)
            if recomputed:
                model.gradient_checkpointing_enable({"use_reentrant": False})
            return model

        def loss(self, model: Any, batch: Any) -> Any:
            return model(input_ids=batch, labels=batch).loss

        def build_training_data_loader(self) -> Any:
            return self.training_loader(torch.zeros(64, TOKENS, dtype=torch.long))

        build_validation_data_loader = build_training_data_loader

    ds_config = {"optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}}
    hparams = {"global_batch_size": SAMPLES, "deepspeed_config": ds_config}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        Trainer(Mine(context), context).fit(
            max_length=Batch(5), checkpoint_policy="none", profile={**PROFILE, "active": 1}
        )


@pytest.mark.parametrize(
    ("attention", "dropout", "recomputed"),
    [("eager", 0.1, False), ("sdpa", 0.0, True)],
)
def test_a_transformers_step_has_the_operations_of_the_formula(
    attention: str, dropout: float, recomputed: bool, one_rank: Ranks, tmp_path: Path
) -> None:
    """What is computed again, by checkpointing or fused attention, is no work of the model."""
    one_rank.run(train_transformer, tmp_path, attention, dropout, recomputed)
    assert profile_of(tmp_path)["ranks"][0]["flops"] == TRANSFORMER
