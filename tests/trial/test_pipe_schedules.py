"""Every schedule of a pipeline trains as plain PyTorch does: losses, weights and validations to 1e-5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed
from tests.trial.pipelines import BATCH, TIME, WIDTH, Case, pipeline_trial, plainly, trained

PARTS = (("1f1b", 1), ("gpipe", 1), ("interleaved", 1), ("interleaved", 2), ("interleaved", 4))
SCHEDULES = (*PARTS, ("dualpipev", 2), ("zb-h1", 1))


def cases_of(schedule: str, chunks: int) -> list[Case]:
    """On two ranks; one pipeline of four stages; two replicas of two."""
    case = Case(schedule=schedule, chunks=chunks)
    return [
        case,
        replace(case, zero=1, clipping=0.0, micro_batches=8),
        replace(case, zero=1, dropout=0.0, interval=0 if schedule == "zb-h1" else 1),
        replace(case, ranks=4, micro_batches=8),
        replace(case, replicas=2, zero=1),
    ]


MORE = pytest.mark.long("more parts, ranks, replicas and settings: the short case has some of each")
SHORT = [Case(schedule="interleaved", chunks=2, interval=2), Case(schedule="zb-h1", zero=1)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHORT, id="short"),
        *(pytest.param(cases_of(*each), id="-".join(map(str, each)), marks=MORE) for each in SCHEDULES),
    ],
)
def test_it_trains_as_plain_pytorch(
    two_ranks: Ranks, four_ranks: Ranks, tmp_path: Path, cases: list[Case]
) -> None:
    """Tied weights, functions, dropout, accumulation, clipping, validation with a tail."""
    for number, case in enumerate(cases):
        ranks = two_ranks if case.ranks * case.replicas == 2 else four_ranks
        of_ranks, expected = trained(ranks, tmp_path / str(number), case), plainly(case)
        for own in of_ranks:
            assert own.losses == pytest.approx(expected.losses, abs=1e-5), case
            assert own.evaluated == pytest.approx(expected.evaluated, abs=1e-5), case
            for name, weight in own.weights.items():
                assert np.abs(weight - expected.weights[name]).max() < 1e-5, (name, case)
        assert set().union(*(own.weights for own in of_ranks)) == set(expected.weights), case


BF16 = {"bf16": {"enabled": True}}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (0, BF16),
    "bf16, ZeRO 1": (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16, ZeRO 1": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "timed": (0, {"wall_clock_breakdown": True, "steps_per_print": 2}),
}


@pytest.mark.long("each way in which an optimizer takes gradients; in fp32 above")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_precision_trains_as_1f1b_does(two_ranks: Ranks, tmp_path: Path, setting: str) -> None:
    """To the bit, with the same parts."""
    zero, more = SETTINGS[setting]
    cases = [Case(schedule=name, zero=zero, more=more, steps=6) for name in ("1f1b", "zb-h1")]
    found = [trained(two_ranks, tmp_path / case.schedule, case) for case in cases]
    for expected, own in zip(*found, strict=True):
        assert expected.evaluated[1] < expected.evaluated[0]
        assert (own.losses, own.evaluated) == (expected.losses, expected.evaluated)
        assert all(np.array_equal(own.weights[name], each) for name, each in expected.weights.items())


# ------------------------------------------------------------------------------------------- between stages


class Handing(torch.nn.Module):
    """Hands on numbers and a mask beside its output, as a model does that is cut where its padding is needed.

    Integers, truth values and a view; or all of one type, in memory of its own, as 1F1B of DeepSpeed's has it.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 0.5))
        self.dtype = dtype

    def forward(self, inputs: Any) -> Any:
        hidden, places, mask = inputs if isinstance(inputs, tuple) else (inputs, torch.arange(TIME), None)
        mask = hidden > 0 if mask is None else mask
        hidden = (hidden * self.weight + places.unsqueeze(-1)) * mask
        if self.dtype is not None:
            return hidden, *((each + 0 * hidden.sum()).to(self.dtype) for each in (places + 1, mask))
        return hidden.transpose(0, 1).contiguous().transpose(0, 1), places + 1, mask


def first_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs[0], targets)


def handed_on(
    run_dir: Path, case: Case, sizes: list[int], dtype: torch.dtype | None = None
) -> tuple[float, float]:
    """In a rank: the loss of a step in a pipeline, and by plain PyTorch."""
    from determined_ds import open_context

    with open_context(hparams=case.hyperparameters, run_dir=run_dir, accelerator="cpu") as context:
        layers, interval = [Handing(dtype) for _ in range(4)], case.interval
        engine = pipeline_trial(layers, first_of, activation_checkpoint_interval=interval)(context).engine
        given = [(torch.linspace(-1, 1, size * TIME * WIDTH).view(size, TIME, WIDTH),) * 2 for size in sizes]
        plain = torch.nn.Sequential(*(Handing(dtype) for _ in range(4)))
        expected = sum(first_of(plain(inputs), targets).item() for inputs, targets in given) / len(given)
        return float(engine.train_batch(iter(given))), expected


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, two_ranks: Ranks) -> dict[int, Ranks]:
    return {2: two_ranks, 3: Ranks(3, tmp_path_factory.mktemp("three"))}


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        (Case(schedule="interleaved", chunks=2), None),
        (Case(schedule="zb-h1"), None),
        (Case(schedule="1f1b", ranks=3), torch.float32),
    ],
)
def test_tensors_of_several_types_pass_between_stages(
    ranks: dict[int, Ranks], tmp_path: Path, case: Case, dtype: torch.dtype | None
) -> None:
    for own, expected in ranks[case.ranks].run(handed_on, tmp_path, case, [BATCH] * 4, dtype):
        assert own == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "sizes", "said"),
    [
        # Through the middle of 1F1B only floats pass: integers would arrive as something else.
        (Case(schedule="1f1b", ranks=3), [BATCH] * 4, r"stage 0 sends torch\.int64"),
        (
            Case(schedule="gpipe"),
            [BATCH] * 3 + [1],
            r"a micro-batch of \(1, 3, 8\), .* after one of \(4, 3, 8\)",
        ),
        (Case(schedule="zb-h1", interval=1), [BATCH] * 4, r"MyPipeline\.activation_checkpoint_interval = 1"),
    ],
)
def test_what_only_the_trial_shows_is_refused(
    ranks: dict[int, Ranks], tmp_path: Path, case: Case, sizes: list[int], said: str
) -> None:
    with pytest.raises(RanksFailed, match=said):
        ranks[case.ranks].run(handed_on, tmp_path, case, sizes, torch.int64 if case.ranks == 3 else None)


# ------------------------------------------------------------------------------------------- before them


def first_weights(case: Case, partition: str) -> dict[str, list[float]]:
    """The weights of this rank's layers, of which the first and the last Linear but one are tied."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from determined_ds import open_context

    ends = [TiedLayerSpec("ends", torch.nn.Linear, WIDTH, WIDTH) for _ in range(2)]
    first, *more = [LayerSpec(torch.nn.Linear, WIDTH, WIDTH) for _ in range(5)]
    layers = [first, ends[0], *more, ends[1], LayerSpec(torch.nn.LayerNorm, WIDTH)]
    trial = pipeline_trial(layers, first_of, partition)
    with open_context(hparams=case.hyperparameters, accelerator="cpu") as context:
        weights = trial(context).engine.module.named_parameters()
        return {name: each.detach().flatten().tolist() for name, each in weights}


def test_first_weights_do_not_depend_on_the_cut(one_rank: Ranks, two_ranks: Ranks) -> None:
    """And no two layers draw the same."""
    case = Case(schedule="1f1b")
    [whole] = one_rank.run(first_weights, replace(case, ranks=1), "uniform")
    of_matrices = [tuple(each) for name, each in whole.items() if len(each) > WIDTH]
    assert len(set(of_matrices)) == len(of_matrices) == 6
    for schedule, chunks, partition in (
        ("1f1b", 1, "uniform"),
        ("1f1b", 1, "type:linear"),
        ("interleaved", 2, "uniform"),
        ("dualpipev", 2, "uniform"),
    ):
        for own in two_ranks.run(first_weights, replace(case, schedule=schedule, chunks=chunks), partition):
            assert own == {name: whole[name] for name in own}, (schedule, partition)
