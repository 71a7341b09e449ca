"""Strategies side by side: measured in turns, and each told apart from those that fail, or cannot run at all."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import determined_ds
from determined_ds.config.accelerator import Accelerator
from determined_ds.documents.reading import dump_yaml
from determined_ds.errors import ConfigError
from determined_ds.launch.interrupts import Interrupts
from determined_ds.protocol.run_dir import STEP_GROUP, RunDir
from determined_ds.report.repetition import Repetition
from determined_ds.report.results import CANNOT_RUN, FAILED, MEASURED, OUT_OF_MEMORY, STOPPED, write_row
from determined_ds.tune.compare import in_turn
from determined_ds.tune.measurement import estimated_state_bytes, in_words, measure, merged, unmeasured
from determined_ds.tune.variants import Variant, named_variants
from determined_ds.tune.workbench import threads_per_rank
from tests.tune.bases import CONST, ROOT, SHAPE, base_of, row_of


def variant(name: str = "zero1") -> Variant:
    [found] = named_variants(base_of(), [name], [2])
    return found


# ------------------------------------------------------------------------------------------------ in turns


@given(st.integers(1, 20), st.integers(1, 10))
def test_each_is_early_as_often_as_late(count: int, repetitions: int) -> None:
    """Every one once a repetition; over two of them the sum of the places is the same for all."""
    orders = [in_turn(count, repetition) for repetition in range(2 * repetitions)]
    assert all(sorted(order) == list(range(count)) for order in orders)
    places: Counter[int] = Counter()
    for order in orders:
        places.update({index: place for place, index in enumerate(order)})
    assert len(set(places.values())) == 1 or count == 1


def test_every_strategy_has_as_many_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """So many that the most ranks there are fit the cores; who states how many has them."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    eight = replace(base_of(), accelerator=Accelerator(name="cpu", num_devices=8, bf16=False, fp16=False))
    assert [threads_per_rank(eight, slots) for slots in (1, 2, 3, 8, 16)] == [8, 4, 2, 1, 1]
    on_gpus = replace(eight, accelerator=Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True))
    assert threads_per_rank(on_gpus, 2) is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads_per_rank(eight, 2) is None


# -------------------------------------------------------------------------------------------------- rows


def test_repetitions_are_one_row() -> None:
    rows = [row_of(variant(), seconds) for seconds in ([1.0, 1.2], [2.0, 2.2], [1.5])]
    row = merged(rows)
    assert row.status == MEASURED
    assert [each.step_seconds for each in row.repetitions] == [(1.0, 1.2), (2.0, 2.2), (1.5,)]


@pytest.mark.parametrize("status", [FAILED, OUT_OF_MEMORY, CANNOT_RUN])
def test_what_fails_once_is_not_to_be_relied_upon(status: str) -> None:
    good, bad = row_of(variant(), [1.0]), unmeasured(variant(), status, "it crashed")
    assert merged([bad]) == bad
    row = merged([good, bad, good])
    assert row.status == status
    assert row.reason == "in one of 3 starts: it crashed"
    assert not row.repetitions


def test_what_was_cut_short_says_nothing_of_the_others() -> None:
    good, cut = row_of(variant(), [1.0]), row_of(variant(), [3.0], status=STOPPED, reason="interrupted")
    assert merged([good, cut]) == good
    assert merged([cut]) == cut
    assert merged([cut]).median_step_seconds == 3.0
    assert not merged([cut]).is_measured


def test_a_row_in_words() -> None:
    assert in_words(row_of(variant(), [0.5])) == "500 ms a step, 64.0 samples/s"
    assert in_words(unmeasured(variant(), FAILED, "it crashed")) == "failed: it crashed"


def test_an_unmeasured_row_says_what_would_have_run() -> None:
    row = unmeasured(variant("zero2"), FAILED, "")
    assert (row.zero_stage, row.micro_batch_size, row.accumulation, row.replicas) == (2, 16, 1, 2)
    assert (row.precision, row.samples_per_step) == ("fp32", 32)
    [cannot] = named_variants(base_of(), ["zeropp"], [2])
    assert unmeasured(cannot, CANNOT_RUN, cannot.reason).replicas is None


def test_estimates_count_what_a_walk_through_the_engine_would() -> None:
    """16 bytes a parameter under ZeRO 0 in fp32; less where ranks share them."""
    parameters = SHAPE.num_parameters
    assert estimated_state_bytes(variant("zero0"), SHAPE) == 16 * parameters
    sizes = [estimated_state_bytes(variant(f"zero{stage}"), SHAPE) or 0 for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True)
    assert estimated_state_bytes(variant("zeropp"), SHAPE) is None


# ------------------------------------------------------------------------------- what was measured before


def written(
    run_dir: Path, of: Variant, steps: int, warmup: int, status: str = MEASURED, engine: str = "deepspeed"
) -> None:
    """A run directory as a measurement leaves it."""
    assert of.document is not None
    run_dir.mkdir(parents=True)
    (RunDir(run_dir).given).write_text(dump_yaml(of.document.data))
    row = row_of(of, [0.1] * steps, status=status)
    repetition: Repetition = replace(row.repetitions[0], warmup=warmup)
    made = replace(row, name="ZeRO 1", engine=engine, repetitions=(repetition,))
    write_row(made, RunDir(run_dir).measured)


def measured_in(run_dir: Path, of: Variant) -> object:
    """What is made of a run directory, where nothing may be started: there is no such context directory."""
    interrupts = Interrupts("")
    interrupts.signals.append(2)
    return measure(
        of,
        context_dir=run_dir / "missing",
        run_dir=run_dir,
        accelerator="cpu",
        steps=4,
        warmup=2,
        interrupts=interrupts,
    ).status


def test_what_is_there_is_taken(tmp_path: Path) -> None:
    """By the name of its strategy, and with the place where it is."""
    run_dir = tmp_path / "runs" / "zero1-x2" / "1"
    written(run_dir, variant(), 4, 2)
    row = measure(
        variant(),
        context_dir=tmp_path,
        run_dir=run_dir,
        accelerator="cpu",
        steps=4,
        warmup=2,
        interrupts=Interrupts(""),
    )
    assert (row.name, row.status) == ("zero1", MEASURED)
    assert row.repetitions[0].run_dir == "zero1-x2/1"


@pytest.mark.parametrize(
    ("of", "steps", "warmup", "status"),
    [
        ("zero2", 4, 2, MEASURED),  # another experiment
        ("zero1", 3, 2, MEASURED),  # of another length
        ("zero1", 4, 1, MEASURED),
        ("zero1", 4, 2, STOPPED),  # not whole
    ],
)
def test_anything_else_is_not(of: str, steps: int, warmup: int, status: str, tmp_path: Path) -> None:
    """It is measured, which here is interrupted at once."""
    written(tmp_path / "run", variant(of), steps, warmup, status)
    assert measured_in(tmp_path / "run", variant()) in (STOPPED, CANNOT_RUN)


def test_a_measurement_of_another_engine_is_not_taken(tmp_path: Path) -> None:
    """As a trial by hand left it, which DeepSpeed trained, and which was called ddp."""
    written(tmp_path / "run", variant("ddp"), 4, 2, engine="deepspeed")
    assert measured_in(tmp_path / "run", variant("ddp")) in (STOPPED, CANNOT_RUN)


def test_a_damaged_measurement_is_none(tmp_path: Path) -> None:
    written(tmp_path / "run", variant(), 4, 2)
    RunDir(tmp_path / "run").measured.write_text("{")
    assert measured_in(tmp_path / "run", variant()) in (STOPPED, CANNOT_RUN)


def test_where_the_profiler_fails_it_is_measured_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All timed steps are done, and the process ends badly: the next one records none."""
    started: list[list[str]] = []

    class Process:
        def __init__(self, *, arguments: list[str], **_: object) -> None:
            started.append(arguments)

        def start(self) -> None:
            self._records = [{"group": STEP_GROUP, "metrics": {"step_seconds": 0.1}}] * 6
            if "--parts" not in started[-1]:
                written(tmp_path / "run", variant(), 4, 2)

        def poll(self) -> int:
            return int("--parts" in started[-1])

        def new_metrics(self) -> list[dict[str, object]]:
            return self._records

        def kill(self) -> None:
            pass

    monkeypatch.setattr("determined_ds.tune.measurement.TrialProcess", Process)
    row = measure(
        variant(),
        context_dir=tmp_path,
        run_dir=tmp_path / "run",
        accelerator="cpu",
        steps=4,
        warmup=2,
        interrupts=Interrupts(""),
        parts=3,
    )
    assert (row.status, row.num_steps, row.parts) == (MEASURED, 4, None)
    assert ["--parts" in words for words in started] == [True, False]


# --------------------------------------------------------------------------------------------- from Python


def test_numbers_that_make_no_sense_are_all_told() -> None:
    with pytest.raises(ConfigError) as caught:
        determined_ds.compare(ROOT / CONST, ROOT, strategies=["zero0"], steps=0, repeat=0, slots=[2, -1])
    assert [problem.key for problem in caught.value.problems] == ["steps", "repeat", "slots -1"]
    with pytest.raises(ConfigError) as caught:
        determined_ds.compare(ROOT / CONST, ROOT, strategies=["zero9"])
    assert caught.value.problems[0].value == "zero9"
