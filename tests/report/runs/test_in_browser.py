"""The page in a real browser: it draws, says nothing on the console, and runs no other script."""

from __future__ import annotations

import math
import re
from pathlib import Path

from determined_ds.report.runs.runs_page import runs_page
from tests.browser import chromium, needs_browser, saved
from tests.report.recorded import course, launch, recorded, shown, training

pytestmark = needs_browser


def test_each_picture_is_drawn_at_either_width(tmp_path: Path) -> None:
    odd = [*course(40), training(41, loss=math.nan), training(42, loss=math.inf, lr=-1.0)]
    launches = [launch(), launch(time=launch().time + 20.5, kind="resume", steps_completed=20)]
    runs = [
        shown(recorded(tmp_path / "one", odd, launches=launches, checkpoints=[20, 40]), "one"),
        shown(recorded(tmp_path / "two", course(30), launches=()), "<script>alert(1)</script>"),
        shown(recorded(tmp_path / "none"), "none"),
    ]
    page = saved(runs_page(runs), tmp_path / "page.html")
    for width in (400, 1400):
        dom, complaints = chromium(page, width=width, height=5000)
        assert complaints == []
        drawn, still = (len(re.findall(tag, dom)) for tag in ("<canvas", "<svg"))
        assert drawn >= 1  # those that have come into view
        assert drawn + still == 3


def test_a_run_without_a_report_is_a_page_too(tmp_path: Path) -> None:
    dom, complaints = chromium(saved(runs_page([shown(recorded(tmp_path / "run"))]), tmp_path / "page.html"))
    assert complaints == []
    assert "Nothing was reported" in dom


def test_a_script_that_is_not_its_own_does_not_run(tmp_path: Path) -> None:
    text = runs_page([shown(recorded(tmp_path / "run", course(10)))])
    foreign = text.replace("</main>", "</main><script>document.body.append('foreign')</script>")
    dom, complaints = chromium(saved(foreign, tmp_path / "page.html"))
    assert "foreign</body>" not in dom.replace("\n", "")
    assert any("Content Security Policy" in each for each in complaints)
