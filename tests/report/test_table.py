"""The table of the terminal, and CSV."""

from __future__ import annotations

import csv
import io
import re

import pytest
from hypothesis import given
from rich.cells import cell_len
from rich.console import Console

from determined_ds.report.results import CANNOT_RUN, Results
from determined_ds.report.table import results_table, rows_csv
from tests.report.making import PARTS, any_results, comparison, failed, few, repetition, results, row


def rendered(found: Results, width: int) -> str:
    file = io.StringIO()
    Console(width=width, file=file, color_system=None).print(results_table(found))
    text = file.getvalue()
    assert all(cell_len(line) <= width for line in text.splitlines())
    return text


def numbers_in(text: str) -> list[str]:
    return sorted(re.findall(r"[+-]?[\d,]*\.?\d+x?", text))


@pytest.mark.parametrize("width", [80, 120])
def test_every_number_is_there(width: int) -> None:
    lines = rendered(comparison(), width).splitlines()
    at = next(index for index, line in enumerate(lines) if re.match(r"zero1 +2", line))
    assert " ".join(lines[at].split()) == "zero1 2 245.0 258.5 130.6 1.69x 700.0 1.00x 3.1500"
    below = "2 replicas 16 x 1 240.0–255.0 16,718 12.00 (11.00) +0.0000"
    assert " ".join(lines[at + 1].split()) == below


def test_it_says_what_each_is_best_for() -> None:
    """As a column where there is room, below the row where there is none."""
    wide, narrow = rendered(comparison(), 200), rendered(comparison(), 80)
    assert re.search(r"^zero0 +2 .*  speed, time to loss$", wide, re.MULTILINE)
    assert "\n  best for speed, time to loss\n" in narrow
    assert "no row is best for loss" in " ".join(wide.split())


@pytest.mark.parametrize("width", [60, 80, 200])
def test_names_of_a_tuning_can_be_distinct_names(width: int) -> None:
    names = [
        f"zero{stage} micro 16 bf16{word} math attention" for stage in (0, 1) for word in ("", " compiled")
    ]
    lines = [" ".join(line.split()) for line in rendered(results(*map(row, names)), width).splitlines()]
    for name in names:
        assert sum(line == name or line.startswith(f"{name} 2 ") for line in lines) == 1


def test_what_a_narrow_terminal_leaves_out_is_named() -> None:
    text = rendered(comparison(), 60)
    assert "no room here for: p95, ms, loss / vs. first" in " ".join(text.split())
    assert re.search(r"^zero0 +1 ", text, re.MULTILINE)  # the slots tell it from the other zero0
    assert re.search(r"^zero0 +2 ", text, re.MULTILINE)


def test_where_the_time_of_a_step_goes_is_below() -> None:
    text = rendered(results(row("zero1", repetition(parts=PARTS))), 80)
    assert "\n  step: backward 50 %, forward 22 %, communication 20 %, optimizer 5 %, data 2 %\n" in text


def test_a_pipeline_has_its_bubble_below() -> None:
    text = " ".join(rendered(comparison(), 80).split())
    assert "bubble 14.1 % of the time; 11.1 % by the schedule alone" in text


def test_a_row_that_was_not_measured_says_why_across() -> None:
    text = rendered(comparison(), 80)
    assert re.search(r"^zero3 +1  out of memory: it asked for 2 GiB *$", text, re.MULTILINE)
    assert re.search(r"^pipeline +1  cannot run: 2 stages need 2 slots or more *$", text, re.MULTILINE)


def test_it_says_what_resident_memory_is() -> None:
    assert "torch itself" in rendered(comparison(), 120)
    assert "torch itself" not in rendered(results(row(), accelerator="cuda"), 120)


def test_what_is_not_known_takes_no_line() -> None:
    text = rendered(results(row("images", tokens_per_sample=None)), 80)
    assert "tokens" not in text
    assert "None" not in text


def test_results_without_a_measurement_are_a_table_too() -> None:
    text = rendered(results(failed("zero3"), failed("pipeline", CANNOT_RUN)), 80)
    assert "out of memory: it asked for 2 GiB" in text
    rendered(results(), 80)


def test_large_numbers_fit_eighty_columns() -> None:
    large = repetition([86_000.0, 87_000.0], peak_memory_bytes_by_rank=(141 * 2**30,), losses=(1234.5,))
    found = results(
        *(row(f"zero3_offload_{at}", large, samples_per_step=2**20, slots=1024) for at in range(2))
    )
    assert numbers_in(rendered(found, 80)) == numbers_in(rendered(found, 200))


def test_nothing_in_a_name_is_markup_or_moves_the_cursor() -> None:
    text = rendered(results(row("[red]a[/red]\x1b[2J"), failed("b", reason="[/]\nTraceback")), 120)
    assert "[red]a[/red]\\x1b[2J" in text
    assert "out of memory: [/] Traceback" in text


@few
@given(any_results())
def test_any_results_have_a_table(found: Results) -> None:
    assert rendered(found, 80)
    assert rendered(found, 60)


# ------------------------------------------------------------------------------------------------------ CSV


def parsed(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text, newline=""), strict=True))


def test_csv_has_a_line_for_each_row() -> None:
    found = comparison()
    lines = parsed(rows_csv(found))
    assert [line["name"] for line in lines] == [each.name for each in found.rows]
    assert [line["status"] for line in lines] == [each.status for each in found.rows]
    measured, missing = lines[0], lines[2]
    assert float(measured["step_median_s"]) == found.rows[0].median_step_seconds
    assert float(measured["samples_per_s"]) == found.rows[0].samples_per_second
    assert int(measured["peak_memory_bytes"]) == found.rows[0].peak_memory_bytes
    assert float(lines[4]["scaling_efficiency"]) == found.scaling_efficiency(found.rows[4])
    assert float(lines[5]["bubble"]) == 0.141
    assert missing["reason"] == "it asked for 2 GiB"
    assert missing["step_median_s"] == ""


def test_the_header_is_stable() -> None:
    """Whoever reads these files goes by these names: add at the end, and rename nothing."""
    header = rows_csv(results()).removesuffix("\r\n")
    assert header == (
        "name,slots,status,reason,zero_stage,replicas,pipe_parallel_size,micro_batch_size,accumulation,precision,"
        "samples_per_step,tokens_per_sample,num_repetitions,num_timed_steps,start_s,step_median_s,step_p95_s,"
        "step_lowest_repetition_s,step_highest_repetition_s,samples_per_s,tokens_per_s,"
        "samples_per_s_against_first,scaling_efficiency,peak_memory_bytes,peak_memory_against_first,"
        "model_state_bytes,estimated_model_state_bytes,bubble,bubble_ideal,loss,loss_against_first,"
        "seconds_to_target_loss,target_loss,best_for,data_share,forward_share,backward_share,communication_share,"
        "optimizer_share,pipeline_share,idle_share,other_share,predicted_step_s"
    )


def test_csv_is_that_of_the_standard() -> None:
    """RFC 4180: lines end with CR LF; what holds a comma or a quote is quoted, and quotes are doubled."""
    text = rows_csv(results(failed("zero3", reason='a "b", c')))
    assert text.count("\r\n") == text.count("\n") == 2
    assert '"a ""b"", c"' in text


@few
@given(any_results())
def test_any_results_are_csv(found: Results) -> None:
    lines = parsed(rows_csv(found))
    assert len(lines) == len(found.rows)
    for line, each in zip(lines, found.rows, strict=True):
        assert None not in line
        assert int(line["slots"]) == each.slots
        assert line["step_median_s"] == (
            "" if each.median_step_seconds is None else repr(each.median_step_seconds)
        )
