"""A comparison: the numbers that follow from measurements, its files and its table, which row is best."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from determined_ds import Results, load_results
from tests.package import write_report
from tests.report.making import CANNOT_RUN, MIB, comparison, failed, repetition, results, row
from tests.report.pages import EVIL, Page


def test_a_row_sums_up_all_steps_of_all_repetitions() -> None:
    memory = {"peak_memory_bytes_by_rank": [720 * MIB, 1], "model_state_bytes_by_rank": [1, 13 * MIB]}
    more = repetition([0.3, 0.5], **memory)
    measured = results(row("zero1", repetition([0.1, 0.2, 0.9]), more)).rows[0]
    assert (measured.median_step_seconds, len(measured.step_seconds)) == (0.3, 5)
    assert measured.p95_step_seconds == pytest.approx(0.82)  # 0.8 of the way from the fourth to the fifth
    assert measured.spread == (0.2, 0.4)  # of the repetitions' own medians
    assert (measured.samples_per_second, measured.tokens_per_second) == (32 / 0.3, 128 * 32 / 0.3)
    assert measured.samples_per_second_spread == (32 / 0.4, 32 / 0.2)
    assert (measured.peak_memory_bytes, measured.model_state_bytes) == (720 * MIB, 13 * MIB)


def test_losses_are_means_over_repetitions_and_over_the_last_five_steps() -> None:
    def of(*losses: list[float]) -> Any:
        return results(row("zero1", *(repetition([0.5, 0.5], losses=each) for each in losses))).rows[0]

    assert [of([9, 9, 5, 4, 3, 2, 1]).loss, of([9, 5]).loss, of([]).loss] == [3, 7, None]
    assert of([4, 3, 2], [6, 5]).losses == (5, 4, 2)  # the second repetition has no third step
    measured = of([7, 6, 5, 4, 3, 2, 1])
    assert measured.loss_curve == ((2.5, 5), (3.0, 4), (3.5, 3))
    assert [measured.seconds_to(loss) for loss in (4.5, 3, 2.9)] == [3.0, 3.5, None]
    lost = row("c", repetition(losses=["NaN"]))
    ended = [row("a", repetition(losses=[2.0])), row("b", repetition(losses=[2.5])), lost, failed("d")]
    assert results(*ended).target_loss == 2.5  # the highest, so that all reach it
    assert results(lost).target_loss is None


def test_rows_are_compared_with_the_first_measured_one() -> None:
    first = row("zero1", repetition([0.2], losses=[3.0]))
    second = row("zero2", repetition([0.1], losses=[3.5], peak_memory_bytes_by_rank=[350 * MIB]))
    cut, warm_up = row("cut", status="stopped"), row("warm-up only", repetition([]))
    compared = results(failed("zero0"), cut, warm_up, first, second)
    *missing, one, other = compared.rows
    ratios = {"samples_per_second": 2.0, "peak_memory_bytes": 0.5, "loss": 0.5}
    assert (compared.measured, compared.against_first(other)) == ((one, other), ratios)
    assert [compared.against_first(each) for each in missing] == [{}, {}, {}]
    unknown = row("zero3", repetition(peak_memory_bytes_by_rank=[], losses=[]), samples_per_step=None)
    compared = results(unknown, second)
    assert set(compared.against_first(compared.rows[1]).values()) == {None}


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    """Infinite and undefined losses, too; in JSON, where there are no such numbers, they are words."""
    lost = row("lost", repetition(losses=["NaN", "Infinity", "-Infinity"]))
    found = results(*comparison(), lost, failed("zero3", reason='a "b", c\n戦略'))
    path = write_report(found, tmp_path, page=False)[0]
    text, again = path.read_text(), load_results(path)
    assert repr(again) == repr(found)  # NaN is not NaN; it is written the same
    json.loads(text, parse_constant=pytest.fail)
    write_report(again, tmp_path, page=False)
    assert path.read_text() == text


def page_of(found: Results, folder: Path) -> Page:
    return Page(write_report(found, folder)[-1].read_text())


def fast(name: str = "zero1", *steps: float) -> dict[str, Any]:
    return row(name, *(repetition([each]) for each in steps))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([fast("zero1", 0.2), fast("zero0", 0.1)], "zero0 is the fastest: 320 samples/s, 2.00 times zero1."),
        (
            [fast("zero2", 0.21, 0.23), fast("zero1", 0.20, 0.22), fast("zero3", 0.40, 0.41)],
            "zero1 is the fastest: 152 samples/s (too close to zero2 to distinguish).",
        ),
        (
            [fast("zero2", 0.204), fast("zero1", 0.200), failed("zero3")],
            "160 samples/s (too close to zero2 to distinguish); zero3 ran out of memory.",
        ),
        ([failed("a"), failed("b", CANNOT_RUN)], "None of the 2 was measured."),
    ],
)
def test_the_verdict_is_on_top_and_claims_no_ratio_within_the_spread(
    rows: list[dict[str, Any]], said: str, tmp_path: Path
) -> None:
    """Measured once, a row must be faster by more than a twentieth."""
    assert said in page_of(results(*rows), tmp_path).texts["p"][0]


def test_what_came_from_outside_is_text(tmp_path: Path) -> None:
    def of(text: str, folder: str) -> Page:
        one = repetition([0.2], run_dir=text)
        rows = row(text, one), row(f"{text} 2", one, one, slots=1), failed(text, reason=text)
        about = dict.fromkeys(("title", "command", "created", "machine"), text)
        return page_of(results(*rows, **about), tmp_path / folder)

    page = of(EVIL, "evil")
    page.check_sealed_like(of("plain", "plain"))
    assert page.texts["h1"] == page.texts["title"] == [EVIL]
