"""The page: all that was measured in one file, that loads nothing and runs nothing that came from outside."""

from __future__ import annotations

import base64
import hashlib
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from determined_ds.report.page import report_page
from determined_ds.report.results import CANNOT_RUN, Results, Row
from tests.report.making import comparison, failed, repetition, results, row

VOID = {"meta", "link", "br", "img", "input", "hr"}
EVIL = """<script>alert(1)</script><img src=x onerror=alert(2)>"><a href='javascript:alert(3)'>&lt; ${x} </style>"""


class Page(HTMLParser):
    """A page taken apart: its tags are closed in their order, and texts are gathered by the tag around them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        assert len(dict(attrs)) == len(attrs), "an attribute is given twice"
        if tag not in VOID:
            self.open.append(tag)
            self.texts.setdefault(tag, []).append("")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in set(self.open):
            self.texts[tag][-1] += data
        if self.rows and {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data if "small" not in self.open else f" {data}"


@pytest.fixture(scope="module")
def text() -> str:
    return report_page(comparison())


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_the_verdict_is_on_top(page: Page) -> None:
    assert page.texts["p"][0].startswith("zero0 on 2 slots is the fastest: 145 samples/s")


def test_it_says_what_was_run(page: Page) -> None:
    facts = dict(zip(page.texts["dt"], page.texts["dd"], strict=True))
    assert facts == {
        "command": "det-ds compare experiments/gpt2/const.yaml . --strategies zero0,zero1",
        "machine": "x86_64, 2 CPU cores",
        "date": "20 November 2026, 18:40",
        "measured": "2 x 2 steps each, after 2 of warm-up, in fresh processes",
        "global batch": "32 samples of 128 tokens",
    }


def test_every_row_is_in_the_table(page: Page) -> None:
    head, *rows = page.rows
    assert head == [
        "strategy",
        "slots",
        "best for",
        "step, ms spread",
        "p95, ms",
        "samples/s vs. first",
        "tokens/s",
        "scaling",
        "peak, MiB vs. first",
        "states, MiB estimate",
        "bubble ideal",
        "loss vs. first",
        "time, s to 3.150",
    ]
    assert [each[:2] for each in rows] == [
        ["zero0 1 replica, micro 32 x 1", "1"],
        ["zero1 1 replica, micro 32 x 1", "1"],
        ["zero3", "1"],
        ["zero0 2 replicas, micro 16 x 1", "2"],
        ["zero1 2 replicas, micro 16 x 1", "2"],
        ["pipeline 2 stages, micro 4 x 8", "2"],
        ["pipeline 2 stages", "1"],
    ]
    assert [rows[at][2] for at in (0, 3, 5)] == ["", "speed, time to loss", "memory"]
    assert " | ".join(rows[4][3:]) == (
        "245.0 240.0–255.0 | 258.5 | 130.6 1.69x | 16,718 | 90.8 % | 700.0 1.00x | 12.00 11.00 | –"
        " | 3.1500 +0.0000 | 0.980"
    )
    assert rows[5][10] == "14.1 % 11.1 %"
    assert rows[2][2:] == ["out of memory it asked for 2 GiB"]


def test_cells_can_be_sorted_by_their_numbers(page: Page) -> None:
    values = [attrs["data-value"] for tag, attrs in page.tags if tag == "td" and "data-value" in attrs]
    assert repr(comparison().rows[4].samples_per_second) in values


def test_what_failed_is_told_with_its_reason(page: Page) -> None:
    assert "zero3 on 1 slot: out of memory: it asked for 2 GiB" in page.texts["li"]
    assert "pipeline on 1 slot: cannot run: 2 stages need 2 slots or more" in page.texts["li"]


def test_it_holds_its_pictures_and_what_to_see_in_them(page: Page) -> None:
    named = [attrs["id"] for tag, attrs in page.tags if tag == "figure"]
    assert named == ["throughput", "memory", "loss", "scaling", "bubble", "schedules"]
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == len(page.texts["figcaption"]) == 6
    assert all(page.texts["figcaption"])


def test_names_inside_it_are_given_once(page: Page) -> None:
    given = [attrs["id"] for _, attrs in page.tags if "id" in attrs]
    assert len(given) == len(set(given))
    used = re.findall(r"url\(#([^)]*)\)", str(page.tags))
    used += [(attrs["href"] or "")[1:] for tag, attrs in page.tags if tag == "use"]
    assert used
    assert set(used) <= set(given)


def test_it_says_how_it_was_measured(page: Page) -> None:
    told = " ".join(page.texts["li"]).lower()
    for what in (
        "fresh processes",
        "interleaved",
        "warm-up",
        "median",
        "spread",
        "resident memory",
        "estimate",
        "bubble",
    ):
        assert what in told, what


# --------------------------------------------------------------------------------- nothing from outside


def loads(page: Page) -> list[str]:
    """What a browser would fetch: addresses in attributes and in styles, those within the page apart."""
    named = {
        "src",
        "href",
        "xlink:href",
        "action",
        "data",
        "poster",
        "srcset",
        "background",
        "formaction",
        "ping",
    }
    found = [value or "" for _, attrs in page.tags for name, value in attrs.items() if name in named]
    found += re.findall(r"url\(([^)]*)\)|@import", str(page.tags) + "".join(page.texts["style"]))
    return [each for each in found if not each.startswith(("#", "data:,"))]


def scripts(page: Page) -> list[str]:
    handlers = [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    return page.texts["script"] + handlers


def test_it_loads_nothing(page: Page, text: str) -> None:
    assert loads(page) == []
    assert "http:" not in text
    assert "https:" not in text


def test_its_own_policy_lets_nothing_else_run_or_load(page: Page) -> None:
    (policy,) = (attrs["content"] or "" for tag, attrs in page.tags if "http-equiv" in attrs)
    (script,) = page.texts["script"]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")


def markup(page: Page) -> list[str]:
    """Its tags, those of the drawings apart: a longer name leaves room for fewer numbers on an axis."""
    drawing = {"svg", "g", "defs", "path", "use", "clipPath", "clippath", "rect", "text"}
    return [tag for tag, _ in page.tags if tag not in drawing]


def evil(text: str) -> Results:
    """Results in which all that comes from outside is this text."""
    one = repetition([0.2], run_dir=text)
    told = {"title": text, "command": text, "created": text, "machine": text}
    return results(row(text, one), row(f"{text} 2", one, one, slots=1), failed(text, reason=text), **told)


def test_what_came_from_outside_is_text() -> None:
    page = Page(report_page(evil(EVIL)))
    plain = Page(report_page(evil("plain")))
    assert len(scripts(page)) == 1
    assert loads(page) == []
    assert markup(page) == markup(plain)
    assert page.texts["h1"] == page.texts["title"] == [EVIL]
    assert any(EVIL in item for item in page.texts["li"])


@settings(max_examples=20)
@given(st.text(min_size=1, max_size=30))
def test_any_text_is_text(text: str) -> None:
    page = report_page(
        results(failed(text, reason=text), title=text, command=text, created=text, machine=text)
    )
    page.encode()
    assert len(scripts(Page(page))) == 1


def test_the_same_results_give_the_same_bytes(text: str) -> None:
    assert report_page(comparison()) == text


# -------------------------------------------------------------------------------------- not much to tell


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [failed("zero3"), failed("pipeline", CANNOT_RUN)],
        [row("alone", repetition(losses=(), peak_memory_bytes_by_rank=(), model_state_bytes_by_rank=()))],
        [row("images", tokens_per_sample=None, samples_per_step=None, estimated_model_state_bytes=None)],
        [row("lost", repetition(losses=(float("nan"),) * 5))],
    ],
    ids=["nothing", "failures", "one, of which little is known", "no batch", "a loss that is lost"],
)
def test_there_is_always_a_page(rows: list[Row]) -> None:
    page = Page(report_page(results(*rows)))
    assert len(page.rows) == 1 + len(rows)
    told = " ".join(" ".join(cells) for cells in page.rows)
    assert "None" not in told
    assert "nan" not in told


def test_times_are_those_of_the_place_they_were_taken_at() -> None:
    page = Page(report_page(results(created="2026-11-20T18:40:00+00:00")))
    assert "20 November 2026, 18:40 UTC" in page.texts["dd"]
