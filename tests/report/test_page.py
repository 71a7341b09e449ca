"""The page of a comparison: one file that loads nothing, and runs nothing that came from outside."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from determined_ds import Results
from tests.package import write_report
from tests.report.making import CANNOT_RUN, comparison, failed, repetition, results, row
from tests.report.pages import EVIL, Page, loads


def page_of(found: Results, folder: Path) -> Page:
    return Page(write_report(found, folder)[-1].read_text())


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(results(*comparison()), tmp_path_factory.mktemp("report"))


def test_it_says_what_was_run_with_every_row_and_each_reason(page: Page) -> None:
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts["command"] == "det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1"
    assert facts["machine"] == "x86_64, 2 CPU cores"
    assert facts["date"] == "20 November 2026, 18:40"
    _, *rows = page.rows
    assert [cells[0].split()[0] for cells in rows] == [each["name"] for each in comparison()]
    assert rows[2][2:] == ["out of memory it asked for 2 GiB"]
    told = " ".join(rows[4])
    for number in ("245.0", "130.6", "1.69x", "16,718", "90.8 %", "700.0", "3.1500"):
        assert number in told, told
    assert "zero3 on 1 slot: out of memory: it asked for 2 GiB" in page.texts["li"]
    assert "pipeline on 1 slot: cannot run: 2 stages need 2 slots or more" in page.texts["li"]


def test_it_holds_its_pictures_with_a_caption_each(page: Page) -> None:
    named = [attrs["id"] for tag, attrs in page.tags if tag == "figure"]
    assert named == ["throughput", "memory", "loss", "scaling", "bubble", "schedules"]
    assert len(page.texts["figcaption"]) == len(named)
    given = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(given) == len(set(given))
    used = re.findall(r"url\(#([^)]*)\)", str(page.tags))
    used += [(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "use"]
    assert set(used) <= set(given)


def fast(name: str = "zero1", *steps: float, **others: Any) -> dict[str, Any]:
    return row(name, *(repetition([each]) for each in steps), **others)


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (comparison(), "zero0 on 2 slots is the fastest: 145 samples/s"),
        ([fast("zero1", 0.1), fast("zero0", 0.2)], "zero1 is the fastest: 320 samples/s."),
        (
            [fast("zero1", 0.20, 0.22), fast("zero2", 0.21, 0.23), fast("zero3", 0.40, 0.41)],
            "(too close to zero2 to distinguish)",
        ),
        ([fast(), failed("zero3")], "; zero3 ran out of memory."),
        ([fast(), failed("a"), failed("b")], "; 2 of 3 were not measured."),
        ([failed("a"), failed("b", CANNOT_RUN)], "None of the 2 was measured."),
        ([], "Nothing was measured."),
        ([fast("zero1", 0.2)], "zero1 does 160 samples/s."),
    ],
)
def test_the_verdict_is_on_top(rows: list[dict[str, Any]], said: str, tmp_path: Path) -> None:
    assert said in page_of(results(*rows), tmp_path).texts["p"][0]


@pytest.mark.parametrize(
    "rows",
    [
        [row("alone", repetition(losses=[], peak_memory_bytes_by_rank=[], model_state_bytes_by_rank=[]))],
        [row("images", tokens_per_sample=None, samples_per_step=None, estimated_model_state_bytes=None)],
        [row("lost", repetition(losses=["NaN"] * 5))],
    ],
    ids=["little is known", "no batch", "a loss that is lost"],
)
def test_there_is_always_a_page(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    page = page_of(results(*rows), tmp_path)
    assert len(page.rows) == 1 + len(rows)
    assert "None" not in page.words
    assert "nan" not in page.words


# --------------------------------------------------------------------------------- nothing from outside


def test_it_loads_nothing_and_runs_its_own_script_alone(page: Page) -> None:
    page.check_sealed()
    assert len(page.texts["script"]) == 1


def from_outside(text: str) -> Results:
    """Results in which all that comes from outside is this text."""
    one = repetition([0.2], run_dir=text)
    given = {"title": text, "command": text, "created": text, "machine": text}
    return results(row(text, one), row(f"{text} 2", one, one, slots=1), failed(text, reason=text), **given)


def test_what_came_from_outside_is_text(tmp_path: Path) -> None:
    page = page_of(from_outside(EVIL), tmp_path / "evil")
    assert page.markup() == page_of(from_outside("plain"), tmp_path / "plain").markup()
    assert loads(page) == []
    assert page.texts["h1"] == page.texts["title"] == [EVIL]
    assert any(EVIL in item for item in page.texts["li"])


@settings(max_examples=20)
@given(st.text(min_size=1, max_size=30))
def test_any_text_is_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    given = {"title": text, "command": text, "created": text, "machine": text}
    page = page_of(results(failed(text, reason=text), **given), tmp_path_factory.getbasetemp() / "any")
    assert len(page.texts["script"]) == 1
