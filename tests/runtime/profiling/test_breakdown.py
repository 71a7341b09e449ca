"""``fit.breakdown``: the parts of a step as metrics, under every kind of engine, and the training stays as it was."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

SAMPLES, MICRO_BATCHES, WIDTH = 8, 2, 64
FORWARD_S, BACKWARD_S, LATE_S = 0.03, 0.05, 0.06  # planted, in each micro-batch; the last on rank 1 alone
# 2 x samples x weights in each pass; the inputs need no gradient.
FLOPS = 2 * SAMPLES * (3 * WIDTH * WIDTH + 3 * WIDTH * 2 - WIDTH * WIDTH)
PARTS = ("forward_s", "backward_s", "optimizer_s", "communication_s", "communication_bytes")
MEMORY = ("memory_after_forward_gb", "memory_after_backward_gb", "memory_after_optimizer_gb")
SHAPES = {
    **{f"zero{stage}": {"zero_optimization": {"stage": stage}} for stage in range(4)},
    "pipeline": {"zero_optimization": {"stage": 1}},
    "several": {"zero_optimization": {"stage": 1}},
}


class Slow(torch.autograd.Function):
    """Takes its time in both directions."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, late_s: float) -> torch.Tensor:
        ctx.late_s = late_s
        time.sleep(FORWARD_S)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        time.sleep(BACKWARD_S + ctx.late_s)
        return gradient, None


class SlowLinear(torch.nn.Linear):
    late_s = 0.0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(Slow.apply(inputs.requires_grad_(), self.late_s))


def layers(slow: bool) -> list[torch.nn.Module]:
    last = SlowLinear if slow else torch.nn.Linear
    return [torch.nn.Linear(WIDTH, WIDTH), last(WIDTH, 2)]


def trial_of(shape: str, *, slow: bool) -> Any:
    from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial

    mse = torch.nn.functional.mse_loss

    class Data:
        def prepare(self) -> None:
            inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(0))
            self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :2])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(self.data)  # type: ignore[attr-defined]

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(self.data)  # type: ignore[attr-defined]

    class Whole(Data, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*layers(slow))

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return mse(model(batch[0]), batch[1])

    class Staged(Data, PipelineTrial):
        def build_layers(self) -> list[Any]:
            return layers(slow)

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return mse(outputs, targets)

    class Several(Data, SeveralEnginesTrial):
        """The second model is trained through the first, as a generator through its discriminator."""

        def build_models(self) -> dict[str, torch.nn.Module]:
            return {"judge": torch.nn.Sequential(*layers(slow)), "maker": torch.nn.Linear(WIDTH, WIDTH)}

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            judge, maker = self.engines["judge"], self.engines["maker"]
            batches = [next(dataloader_iter) for _ in range(self.resolved.batch.accumulation)]
            for inputs, targets in batches:
                judge.backward(mse(judge(inputs), targets))
                judge.step()
            for inputs, targets in batches:
                loss = mse(judge(maker(inputs)), targets)
                maker.backward(loss)
                maker.step()
            judge.zero_grad()
            return {"loss": loss.detach()}

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            inputs, targets = next(dataloader_iter)
            return {"validation_loss": mse(self.engine(inputs), targets)}

    return {"pipeline": Staged, "several": Several}.get(shape, Whole)


def train(
    run_dir: str, shape: str, breakdown: bool, asked: dict[str, Any], slow: bool = False
) -> tuple[list[dict[str, Any]], str, int]:
    """In a rank: train some batches, with a validation between them.

    Returns:
        The reports, what was printed, and how many numbers DeepSpeed's instruments still hold.
    """
    from deepspeed.comm import comm
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    hparams = {
        "global_batch_size": SAMPLES,
        "pipe_parallel_size": 2 if shape == "pipeline" else 1,
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": MICRO_BATCHES},
        "deepspeed_config": {
            **SHAPES[shape],
            "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
            **asked,
        },
        "fit": {"breakdown": breakdown},
    }
    out = io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
    ):
        trial = trial_of(shape, slow=slow)(context)
        for module in trial.engine.modules():
            if isinstance(module, SlowLinear) and context.distributed.rank == 1:
                module.late_s = LATE_S
        Trainer(trial, context).fit(
            max_length=Batch(8 if slow else 6),
            reporting_period=Batch(1 if slow else 3),
            validation_period=Batch(2),
            breakdown=breakdown,
            checkpoint_policy="none",
        )
        timers = [timer for engine in context.models for timer in engine.timers.timers.values()]
        held = sum(len(getattr(timer, "event_timers", ())) for timer in timers)
        held += sum(
            len(each[1]) for sizes in comm.comms_logger.comms_dict.values() for each in sizes.values()
        )
    if context.distributed.rank != 0:
        return [], out.getvalue(), held
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return [each["metrics"] for each in records if each["group"] == "training"], out.getvalue(), held


@pytest.mark.parametrize("shape", SHAPES)
def test_the_parts_of_a_step_are_reported_and_the_training_stays_the_same(
    two_ranks: Ranks, tmp_path: Path, shape: str
) -> None:
    (plain, _, _), _ = two_ranks.run(train, str(tmp_path / "plain"), shape, False, {})
    (found, printed, held), _ = two_ranks.run(train, str(tmp_path / "parts"), shape, True, {})
    assert [each["loss"] for each in found] == [each["loss"] for each in plain]
    assert not {*PARTS, *MEMORY, "mfu"} & plain[0].keys()
    for metrics in found:
        assert all(metrics[name] > 0 for name in (*PARTS, *MEMORY, "mfu"))
    if shape != "several":
        metrics = found[-1]
        assert 2 * metrics["tflops_per_rank"] * 1e12 * SAMPLES / metrics[
            "samples_per_second"
        ] == pytest.approx(FLOPS)
    assert not any(word in printed for word in ("time (ms)", "Max_MA", "Comm. Op", "iter time"))
    assert held == 0


def median(found: list[dict[str, Any]], over: Callable[[dict[str, Any]], float]) -> float:
    """Of the reports, of a batch each: a rank is put off in some of them."""
    return statistics.median(over(metrics) for metrics in found)


def test_each_part_is_as_long_as_it_takes(two_ranks: Ranks, tmp_path: Path) -> None:
    """A validation of 8 micro-batches lies between two reports, and one rank waits for the other's gradients."""
    (found, _, _), _ = two_ranks.run(train, str(tmp_path), "zero1", True, {}, slow=True)
    forward_s, backward_s = MICRO_BATCHES * FORWARD_S, MICRO_BATCHES * (BACKWARD_S + LATE_S)
    for metrics in found:
        step_s = SAMPLES / metrics["samples_per_second"]
        assert forward_s <= metrics["forward_s"]
        assert backward_s <= metrics["backward_s"] <= step_s
        assert LATE_S <= metrics["communication_s"] < metrics["backward_s"] + metrics["optimizer_s"]
    assert median(found, lambda metrics: metrics["forward_s"]) < forward_s + 0.05
    assert (
        median(
            found,
            lambda metrics: (
                metrics["forward_s"]
                + metrics["backward_s"]
                + metrics["optimizer_s"]
                - SAMPLES / metrics["samples_per_second"]
            ),
        )
        < 0.05
    )


def test_a_stage_waits_for_its_neighbour_and_not_in_a_pass_of_its_own(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """The second stage takes long; the first waits for its gradients, which is communication."""
    (found, _, _), _ = two_ranks.run(train, str(tmp_path), "pipeline", True, {}, slow=True)
    backward_s = MICRO_BATCHES * (BACKWARD_S + LATE_S)
    for metrics in found:
        assert metrics["backward_s"] >= backward_s
        assert metrics["communication_s"] >= backward_s
    assert median(found, lambda metrics: metrics["backward_s"]) < backward_s + 0.08


ASKED = {
    "comms_logger": {"enabled": True},
    "memory_breakdown": True,
    "wall_clock_breakdown": True,
    "flops_profiler": {"enabled": True, "profile_step": 2},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_what_a_json_switches_on_is_printed_and_reported_too(
    two_ranks: Ranks, tmp_path: Path, shape: str
) -> None:
    """In deepspeed 0.19.8 a pipeline's timers, and so its ``flops_profiler``, fail in the first backward pass."""
    (plain, _, _), _ = two_ranks.run(train, str(tmp_path / "plain"), shape, False, {})
    (asked, printed, _), _ = two_ranks.run(train, str(tmp_path / "asked"), shape, False, ASKED)
    (both, again, _), _ = two_ranks.run(train, str(tmp_path / "both"), shape, True, ASKED)
    losses = [each["loss"] for each in plain]
    assert [each["loss"] for each in asked] == [each["loss"] for each in both] == losses
    assert "forward_s" not in asked[0]
    assert all(name in both[0] for name in (*PARTS, *MEMORY))
    for text in (printed, again):
        assert all(word in text for word in ("time (ms)", "Max_MA", "Comm. Op"))


def logged_latencies() -> tuple[list[float], float]:
    """In a rank: DeepSpeed's own latencies of some operations, in ms, and how long all of them took."""
    import deepspeed
    from deepspeed.comm import comm

    from determined_ds.trial.comms_logger import correct_comms_logger

    deepspeed.init_distributed(auto_mpi_discovery=False)
    correct_comms_logger()
    comm.configure(enabled=True, prof_all=True)
    start = time.perf_counter()
    for _ in range(20):
        comm.all_reduce(torch.ones(100_000))
    comm.all_gather_object([None] * comm.get_world_size(), "of which no bandwidth is known")
    [[_, latencies, _, _]] = comm.comms_logger.comms_dict["all_reduce"].values()
    return latencies, (time.perf_counter() - start) * 1000


def test_deepspeeds_logger_logs_what_each_call_has_taken(two_ranks: Ranks) -> None:
    """In deepspeed 0.19.8 it logs the time of all calls so far, and ends the process at an object's gather."""
    for latencies, all_ms in two_ranks.run(logged_latencies):
        assert len(latencies) == 20
        assert sum(latencies) <= all_ms
