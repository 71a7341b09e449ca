"""The panel of a run fits any terminal, says what is known, and leaves out what is not."""

from __future__ import annotations

import math

import pytest

from determined_ds.report.terminal.panel import ASCII, fields_of, panel_lines, panel_text, plain, signs_for
from determined_ds.report.terminal.run_state import RunState
from determined_ds.report.terminal.short_numbers import in_time, number, span
from determined_ds.report.terminal.sparkline import BLOCKS, Thinned, sparkline

REPORT = {
    "lr": 6e-4,
    "grad_norm": 0.8312,
    "loss_scale": 65536.0,
    "samples_per_second": 164.2,
    "tokens_per_second": 21_017.0,
    "peak_memory_gib": 0.712,
    "peak_memory_gib_min": 0.68,
    "memory_allocated_gb": 0.7,
    "memory_reserved_gb": 1.4,
}


def trained(batches: int = 120, total: int | None = 200) -> RunState:
    state = RunState(metric="validation_loss", total=total)
    for batch in range(10, batches + 1, 10):
        state.take("training", batch, {"loss": 5.5 * math.exp(-batch / 60), **REPORT})
        state.at(batch, 1000 + batch / 2)
    state.take("validation", 50, {"batches": 50, "validation_loss": 2.5, "accuracy": 0.4})
    state.take("validation", 100, {"batches": 100, "validation_loss": 2.25, "accuracy": 0.5})
    state.checkpoint, state.checkpoint_time, state.writing = 100, 1000.0, 120
    return state


def shown(state: RunState, columns: int = 80) -> list[str]:
    return plain(panel_lines(state, columns=columns, now=1041.0))


def test_it_says_what_is_known_of_a_run() -> None:
    assert shown(trained()) == [
        "training    batch 120/200  60 %  ━━━━━━━━━━━━━━━━━━────────────  40 s left",
        "loss        0.7443    █▇▆▅▄▃▃▂▂▂▁▁  from 4.656",
        "lr          0.0006  gradient norm 0.8312  loss scale 65,536",
        "speed       164 samples/s  21,017 tokens/s",
        "memory      peak 0.68..0.712 GiB/rank  0.652 now, 1.3 reserved",
        "validation  validation_loss 2.25  the best  at batch 100",
        "checkpoint  batch 100  writing batch 120  41 s ago",
    ]


def test_before_the_first_report_there_is_no_more_than_the_progress() -> None:
    assert shown(RunState(total=200)) == ["training    batch 0/200  0 %  ──────────────────────────────"]
    assert shown(RunState()) == ["training    batch 0"]


@pytest.mark.parametrize("columns", [10, 20, 40, 60, 79, 80, 81, 200])
def test_its_lines_are_shorter_than_the_terminal_and_than_80_columns(columns: int) -> None:
    lines = shown(trained(), columns)
    assert len(lines) == 7
    assert max(map(len, lines)) < min(columns, 80)


def test_on_a_narrow_terminal_the_numbers_stay() -> None:
    assert shown(trained(), 40) == [
        "training    batch 120/200  60 %",
        "loss        0.7443    █▇▆▅▄▃▃▂▂▂▁▁",
        "lr          0.0006",
        "speed       164 samples/s",
        "memory      peak 0.68..0.712 GiB/rank",
        "validation  2.25  the best",
        "checkpoint  batch 100",
    ]


def test_a_worse_validation_stands_beside_the_best() -> None:
    state = trained()
    state.take("validation", 150, {"validation_loss": 2.41})
    assert shown(state)[5] == "validation  validation_loss 2.41  at batch 150  best 2.25 at 100"
    state.take("validation", 160, {"validation_loss": math.nan})
    assert shown(state)[5] == "validation  validation_loss nan  at batch 160  best 2.25 at 100"


def test_without_a_metric_to_go_by_no_validation_is_the_best() -> None:
    state = RunState()
    state.take("validation", 5, {"batches": 5, "accuracy": 0.5})
    assert shown(state)[-1] == "validation  accuracy 0.5  at batch 5"


def test_it_knows_the_names_of_transformers_and_what_is_measured() -> None:
    state = RunState()
    state.take("training", 5, {"loss": 2.0, "learning_rate": 5e-5})
    state.take("measured", 6, {"step_seconds": 0.0123})
    assert shown(state)[0] == "training    batch 6"
    assert shown(state)[2:] == ["lr          5e-05", "speed       12.3 ms a step"]


def test_a_loss_that_is_not_finite_stands_out() -> None:
    state = trained()
    state.take("training", 130, {**REPORT, "loss": math.nan})
    assert shown(state)[1].startswith("loss        nan       █▇▆▅▄▃▃▂▂▂▁▁!")


def test_a_terminal_without_unicode_gets_other_signs() -> None:
    assert signs_for("ascii") == signs_for("latin-1") == ASCII
    lines = plain(panel_lines(trained(), columns=80, now=1041.0, signs=ASCII))
    assert all(line.isascii() for line in lines)
    assert signs_for("utf-8").levels == signs_for("UTF8").levels == BLOCKS


def test_for_rich_it_ends_in_an_empty_line() -> None:
    """Whatever else is written to the terminal begins on a line of its own."""
    lines = [str(line) for line in panel_text(trained(), columns=80, now=1041.0).renderables]
    assert lines == [*shown(trained()), ""]


def test_the_length_and_the_metric_are_those_of_the_experiment() -> None:
    config = {"searcher": {"metric": "accuracy", "smaller_is_better": False}}
    assert fields_of(config) == {"metric": "accuracy", "smaller_is_better": False, "total": None}
    for length, total in (({"batches": 20}, 20), ({"epochs": 2}, None), ("x", None)):
        assert fields_of({"hyperparameters": {"fit": {"max_length": length}}})["total"] == total


def test_a_curve_has_at_most_so_many_signs() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0, 1.0], 10) == "▁▁"
    assert sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert sparkline([float(value) for value in range(1000)], 8) == BLOCKS
    assert sparkline([1.0, 2.0], 0) == ""
    assert sparkline([math.inf, 1.0, 3.0], 3) == "!▁█"
    assert sparkline([math.nan, math.nan], 3) == "!!"


def test_a_long_curve_takes_bounded_room_and_keeps_its_shape() -> None:
    kept = Thinned(most=16)
    for value in range(10_000):
        kept.add(float(value))
    assert len(kept.values) <= 16
    assert kept.values == sorted(kept.values)
    assert kept.values[0] < 1000 < 8000 < kept.values[-1]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0 s"),
        (119, "119 s"),
        (121, "2 min"),
        (7260, "2 h 01 min"),
        (200_000, "2 d 7 h"),
        (math.inf, "?"),
    ],
)
def test_times_are_read_at_a_glance(seconds: float, words: str) -> None:
    assert in_time(seconds) == words


def test_numbers_are_short() -> None:
    assert [number(value) for value in (0.000123456, 2.0, 1234.5, 65536.0, 1e12, math.nan)] == [
        *("0.0001235", "2", "1,234", "65,536", "1e+12", "nan")
    ]
    assert span(1.0, 1.001, "GiB") == "1 GiB"
