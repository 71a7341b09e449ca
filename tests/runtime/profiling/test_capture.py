"""Steps recorded in the ordinary loop: the training stays the same to the bit, and the parts add up to the step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determined_ds.profile.analysis import analyse
from determined_ds.profile.step_parts import Profile
from determined_ds.protocol.profile_files import traces_in
from tests.ranks import Ranks, RanksFailed
from tests.recorded_steps import assert_adds_up

PROFILE = {"wait": 2, "warmup": 1, "active": 3}


def train(run_dir: Path, profile: Any, zero_stage: int = 1, case: str = "") -> Any:
    """Train 8 batches in this rank. Returns its losses, and what is left of the ranges."""
    import torch
    from deepspeed.runtime.engine import DeepSpeedEngine
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    torch.manual_seed(3)
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randn(256, 8))
    losses: list[float] = []
    before = [
        DeepSpeedEngine.forward,
        DeepSpeedEngine.backward,
        DeepSpeedEngine.step,
        torch.autograd.backward,
    ]

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            if case == "own profiler":
                self.context.set_profiler(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1))
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
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        trial = Mine(context)
        length = Batch(4 if case == "short" else 8)
        fit = {"max_length": length, "checkpoint_policy": "none", "validation_period": Batch(4)}
        Trainer(trial, context).fit(**fit, profile=profile)
        after = [
            DeepSpeedEngine.forward,
            DeepSpeedEngine.backward,
            DeepSpeedEngine.step,
            torch.autograd.backward,
        ]
        hooks = [len(module._forward_hooks) for module in trial.engine.module[0].modules()]
    return losses, before == after, hooks, "move" in vars(context._mover)


def profile_of(run_dir: Path) -> Profile:
    return analyse(traces_in(run_dir))


def test_losses_are_those_of_a_training_that_is_not_recorded(one_rank: Ranks, tmp_path: Path) -> None:
    [(plain, _, hooks, _)] = one_rank.run(train, tmp_path / "plain", None)
    [(found, unpatched, hooks_after, moves)] = one_rank.run(train, tmp_path / "profiled", PROFILE)
    assert found == plain
    assert unpatched
    assert hooks_after == hooks
    assert not moves
    assert not (tmp_path / "plain" / "profile").exists()
    profile = profile_of(tmp_path / "profiled")
    [rank] = profile.ranks
    assert [step.batch for step in rank.steps] == [4, 5, 6]
    assert (profile.wait, profile.warmup, profile.accumulation, profile.zero_stage) == (2, 1, 2, 1)
    assert_adds_up(profile)
    assert all(rank.seconds[part] > 0 for part in ("data", "forward", "backward", "optimizer"))
    assert rank.seconds["pipeline"] == rank.seconds["idle"] == 0
    weights = 6 * 64 * 64 + 64 * 8
    assert rank.flops == 16 * 2 * (3 * weights - 64 * 64)  # no gradient of the inputs
    assert profile.mfu is not None
    assert 0 < profile.mfu < 1


@pytest.mark.parametrize("zero_stage", [0, 3])
def test_two_ranks_wait_for_their_collectives(zero_stage: int, two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(train, tmp_path, PROFILE, zero_stage)
    profile = profile_of(tmp_path)
    assert [rank.rank for rank in profile.ranks] == [0, 1]
    assert_adds_up(profile)
    assert all(rank.seconds["communication"] > 0 for rank in profile.ranks)
    assert_knows_what_holds_memory(profile, of_ranks=2 if zero_stage == 3 else 1)
    modules = {each.module for each in profile.ranks[0].operators.costliest}
    assert (
        "*" in modules
    )  # layers of a Sequential are named by numbers; which pass of theirs costs most, varies


def assert_knows_what_holds_memory(profile: Profile, *, of_ranks: int) -> None:
    """Weights and Adam's two moments of each, in fp32, divided among so many ranks."""
    weights = 6 * (64 * 64 + 64) + 64 * 8 + 8
    for rank in profile.ranks:
        assert rank.memory is not None
        assert rank.memory.knows_states
        for owner, copies in (("parameters", 1), ("optimizer_states", 2 if of_ranks == 1 else 3)):
            most = max(rank.memory.bytes_by_owner[owner])
            assert most == pytest.approx(4 * copies * weights / of_ranks, rel=0.05), owner
        assert max(rank.memory.bytes_by_owner["gradients"]) > 0
        assert max(rank.memory.bytes_by_owner["activations"]) > 0


def test_a_training_that_ends_before_writes_the_whole_steps_it_has(one_rank: Ranks, tmp_path: Path) -> None:
    one_rank.run(train, tmp_path, PROFILE, 1, "short")
    assert [step.batch for step in profile_of(tmp_path).ranks[0].steps] == [4]


def test_what_it_has_is_written_of_one_that_fails(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="ZeroDivisionError"):
        one_rank.run(train, tmp_path, PROFILE, 1, "fails")
    assert [step.batch for step in profile_of(tmp_path).ranks[0].steps] == [4]


def test_a_profiler_of_the_trials_own_beside_it_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match=r"set_profiler: one profiler at a time") as failed:
        one_rank.run(train, tmp_path, PROFILE, 1, "own profiler")
    assert "fix: leave one of them out" in str(failed.value)


def test_a_wrong_argument_is_refused(one_rank: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksFailed, match="must be 1 or more"):
        one_rank.run(train, tmp_path, {"active": 0})


def test_the_trace_names_modules_and_says_what_was_decided(one_rank: Ranks, tmp_path: Path) -> None:
    import gzip

    one_rank.run(train, tmp_path, PROFILE)
    content = json.loads(gzip.decompress((tmp_path / "profile" / "rank0.json.gz").read_bytes()))
    names = {event["name"] for event in content["traceEvents"]}
    assert {"determined_ds.module.0", "determined_ds.module.7"} <= names
    assert content["determined_ds"]["ds_config"]["train_batch_size"] == 16
    assert [path.name for path in (tmp_path / "profile").iterdir()] == ["rank0.json.gz"]
