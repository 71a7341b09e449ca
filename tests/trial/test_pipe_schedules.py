"""Every schedule of a pipeline trains as plain PyTorch does: losses, weights and evaluations to 1e-5."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from determined_ds.errors import ConfigError
from tests.making import decide
from tests.ranks import Ranks, RanksFailed
from tests.trial.pipelines import BATCH, TIME, WIDTH, Case, Trained, engine_of, in_ranks, plainly

MORE = "more parts, ranks, replicas and settings: test_two_ranks_train_as_plain_pytorch has some of each"
PARTS = (("1f1b", 1), ("gpipe", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4))
SCHEDULES = (*PARTS, ("dualpipev", 2), ("zb-h1", 1))


def agree(ranks: Ranks, cases: list[Case]) -> None:
    of_ranks = ranks.run(in_ranks, cases)
    for number, case in enumerate(cases):
        expected = plainly(case)
        for own in (found[number] for found in of_ranks):
            _close(own, expected, case)
        held = set().union(*(found[number].weights for found in of_ranks))
        assert held == set(expected.weights), case


def _close(own: Trained, expected: Trained, case: Case) -> None:
    assert own.losses == pytest.approx(expected.losses, abs=1e-5), case
    assert own.evaluated == pytest.approx(expected.evaluated, abs=1e-5), case
    for name, weight in own.weights.items():
        assert np.abs(weight - expected.weights[name]).max() < 1e-5, (name, case)


def test_two_ranks_train_as_plain_pytorch(two_ranks: Ranks) -> None:
    """Tied weights, functions, dropout, accumulation, clipping, evaluation with a tail."""
    cases = [Case(schedule="interleaved", chunks=2, interval=2), Case(schedule="zb-h1", zero=1)]
    agree(two_ranks, cases)


@pytest.mark.long(MORE)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_schedule_on_two_ranks(two_ranks: Ranks, schedule: str, chunks: int) -> None:
    case = Case(schedule=schedule, chunks=chunks)
    agree(
        two_ranks,
        [
            case,
            replace(case, zero=1, clipping=0.0, micro_batches=8),
            replace(case, zero=1, dropout=0.0, interval=0 if schedule == "zb-h1" else 1),
        ],
    )


@pytest.mark.long(MORE)
@pytest.mark.parametrize(("schedule", "chunks"), SCHEDULES)
def test_every_schedule_on_four_ranks(four_ranks: Ranks, schedule: str, chunks: int) -> None:
    """One pipeline of four stages, and two replicas of two."""
    case = Case(schedule=schedule, chunks=chunks, ranks=4, micro_batches=8)
    agree(four_ranks, [case, replace(case, ranks=2, micro_batches=4, replicas=2, zero=1)])


BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (0, BF16),
    "bf16, ZeRO 1": (1, {**BF16, **IN_FP32}),
    "bf16, ZeRO 1, at once": (1, {"bf16": {"enabled": True, "immediate_grad_update": True}, **IN_FP32}),
    "fp16, ZeRO 1": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "fp16, ZeRO 1, summed in fp32": (1, {"fp16": {"enabled": True, "loss_scale": 64}, **IN_FP32}),
    "timed": (0, {"wall_clock_breakdown": True, "steps_per_print": 2, "comms_logger": {"enabled": True}}),
}


@pytest.mark.long("each way in which an optimizer takes gradients; in fp32 above")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_precision_trains_as_1f1b_does(two_ranks: Ranks, setting: str) -> None:
    """To the bit with the same parts; with others, the gradient's norm is summed in another order."""
    zero, more = SETTINGS[setting]
    names = (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("dualpipev", 2))
    cases = [Case(schedule=name, chunks=chunks, zero=zero, more=more, steps=6) for name, chunks in names]
    for of_rank in two_ranks.run(in_ranks, cases):
        expected, zb_h1, *others = of_rank
        assert expected.evaluated[1] < expected.evaluated[0] - 0.1
        assert (zb_h1.losses, zb_h1.evaluated) == (expected.losses, expected.evaluated)
        assert all(np.array_equal(zb_h1.weights[name], each) for name, each in expected.weights.items())
        for own in others:
            assert own.losses == pytest.approx(expected.losses, rel=1e-5 if setting == "timed" else 1e-2)
            assert own.evaluated == pytest.approx(
                expected.evaluated, rel=1e-5 if setting == "timed" else 1e-2
            )


# ------------------------------------------------------------------------------------------- between stages


class Handing(torch.nn.Module):
    """Hands on whole numbers and truth values beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, inputs: Any) -> Any:
        hidden, places, mask = inputs if isinstance(inputs, tuple) else (inputs, torch.arange(TIME), None)
        mask = hidden > 0 if mask is None else mask
        hidden = (hidden * self.weight + places.unsqueeze(-1)) * mask
        return hidden.transpose(0, 1).contiguous().transpose(0, 1), places + 1, mask


def first_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs[0], targets)


def handed_on(schedule: str, chunks: int, sizes: list[int]) -> tuple[float, float]:
    """The loss of a step in a pipeline, and by plain PyTorch."""
    case = Case(schedule=schedule, chunks=chunks)
    engine = engine_of(case, [Handing() for _ in range(4)], first_of)
    given = [(torch.linspace(-1, 1, size * TIME * WIDTH).view(size, TIME, WIDTH),) * 2 for size in sizes]
    plain = torch.nn.Sequential(*(Handing() for _ in range(4)))
    expected = sum(float(first_of(plain(inputs), targets)) for inputs, targets in given) / len(given)
    return float(engine.train_batch(iter(given))), expected


@pytest.mark.parametrize(("schedule", "chunks"), [("interleaved", 2), ("zb-h1", 1)])
def test_what_passes_between_stages(two_ranks: Ranks, schedule: str, chunks: int) -> None:
    for own, expected in two_ranks.run(handed_on, schedule, chunks, [BATCH] * 4):
        assert own == pytest.approx(expected, rel=1e-6)


def test_micro_batches_of_several_sizes_are_refused_in_training(two_ranks: Ranks) -> None:
    with pytest.raises(RanksFailed, match=r"a micro-batch of \(1, 3, 8\), .* after one of \(4, 3, 8\)"):
        two_ranks.run(handed_on, "gpipe", 1, [BATCH, BATCH, BATCH, 1])


# ------------------------------------------------------------------------------------------- around them


def test_profiles_name_every_instruction() -> None:
    from determined_ds.runtime.profiling.marks import INSTRUCTIONS
    from determined_ds.trial.ordered_engine import PlannedEngine

    assert set(PlannedEngine._INSTRUCTION_MAP) == set(INSTRUCTIONS)


def test_zb_h1_refuses_what_only_the_trial_shows() -> None:
    from determined_ds import PipelineTrial

    class Trial(PipelineTrial):
        activation_checkpoint_interval = 1
        build_layers = loss = build_training_data_loader = build_validation_data_loader = None  # type: ignore[assignment]

    hp = {"global_batch_size": 8, "pipe_parallel_size": 2, "pipe_schedule": "zb-h1"}
    resolved = decide(hp, {"gradient_accumulation_steps": 4}, slots=2)
    trial: Any = object.__new__(Trial)
    with pytest.raises(ConfigError, match=r"Trial\.activation_checkpoint_interval"):
        trial._check_schedule(resolved.strategy.pipeline)


def test_a_module_that_a_trial_cuts_itself_is_refused() -> None:
    """A schedule that is stated and not carried out."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    from determined_ds.documents.document import Document
    from determined_ds.runtime.adoption import check_pipeline

    engine: Any = object.__new__(PipelineEngine)
    object.__setattr__(engine, "module", None)
    for stages in (1, 2):
        object.__setattr__(engine, "num_stages", stages)
        check_pipeline(engine, Document(name="", data={"pipe_schedule": "1f1b"}))
        stated = Document(name="", data={"pipe_schedule": "zb-h1"})
        if stages == 1:
            check_pipeline(engine, stated)  # of which a rule warns
            continue
        with pytest.raises(ConfigError, match="a PipelineTrial reads it"):
            check_pipeline(engine, stated)


# ------------------------------------------------------------------------------------------- before them


def first_weights(schedule: str, ranks: int, chunks: int | None, partition: str) -> dict[str, list[float]]:
    """The weights of this rank's layers, of which the first and the last Linear but one are tied."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from determined_ds import PipelineTrial, open_context

    class Trial(PipelineTrial):
        partition_method = partition

        def build_layers(self) -> list[Any]:
            ends = [TiedLayerSpec("ends", torch.nn.Linear, WIDTH, WIDTH) for _ in range(2)]
            more = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(5)]
            return [more.pop(), ends[0], *more, ends[1], LayerSpec(torch.nn.LayerNorm, WIDTH)]

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            raise NotImplementedError

        def build_training_data_loader(self) -> Any:
            return None

        def build_validation_data_loader(self) -> Any:
            return None

    hparams = {
        "global_batch_size": 4,
        "micro_batch_size": 1,
        "pipe_parallel_size": ranks,
        "pipe_schedule": schedule,
        "pipe_chunks": chunks,
        "deepspeed_config": {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    }
    with open_context(hparams=hparams, accelerator="cpu") as context:
        weights = Trial(context).engine.module.named_parameters()
        return {name: each.detach().flatten().tolist() for name, each in weights}


def test_first_weights_do_not_depend_on_the_cut(one_rank: Ranks, two_ranks: Ranks) -> None:
    """And no two layers draw the same."""
    [whole] = one_rank.run(first_weights, "1f1b", 1, None, "uniform")
    of_matrices = [tuple(each) for name, each in whole.items() if len(each) > WIDTH]
    assert len(set(of_matrices)) == len(of_matrices) == 6
    for schedule, chunks, partition in (
        ("1f1b", None, "uniform"),
        ("1f1b", None, "type:linear"),
        ("interleaved", 2, "uniform"),
        ("dualpipev", None, "uniform"),
    ):
        for own in two_ranks.run(first_weights, schedule, 2, chunks, partition):
            assert own == {name: whole[name] for name in own}, (schedule, partition)
