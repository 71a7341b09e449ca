"""The page in a real browser: it draws, writes nothing to the console, and runs no other script."""

from __future__ import annotations

import math
from pathlib import Path

from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.browser import chromium, needs_browser
from tests.report.recorded import BEGAN, course, launch, recorded, training

pytestmark = needs_browser


def page_of(*runs: Path) -> Path:
    path = runs[0].parent / "page.html"
    done = CliRunner().invoke(main, ["report", *map(str, runs), "--output", str(path)])
    assert done.exit_code == 0, done.output
    return path


def test_curves_are_drawn_whatever_is_in_them(tmp_path: Path) -> None:
    odd = [*course(40), training(41, loss=math.nan), training(42, loss=math.inf, lr=-1.0)]
    launches = [launch(), launch(time=BEGAN + 20.5, kind="resume", steps_completed=20)]
    page = page_of(
        recorded(tmp_path / "one", odd, launches=launches, checkpoints=[20, 40]),
        recorded(tmp_path / "<b>two", course(30), launches=()),
        recorded(tmp_path / "none"),
    )
    dom, complaints = chromium(page.as_uri(), height=5000)
    assert complaints == []
    assert "<canvas" in dom


def test_a_run_without_a_report_is_a_page_too(tmp_path: Path) -> None:
    dom, complaints = chromium(page_of(recorded(tmp_path / "run")).as_uri())
    assert complaints == []
    assert "Nothing was reported" in dom


def test_a_script_that_is_not_its_own_does_not_run(tmp_path: Path) -> None:
    page = page_of(recorded(tmp_path / "run", course(10)))
    foreign = "</main><script>document.body.append('foreign')</script>"
    page.write_text(page.read_text().replace("</main>", foreign))
    dom, complaints = chromium(page.as_uri())
    assert "foreign</body>" not in dom.replace("\n", "")
    assert any("Content Security Policy" in each for each in complaints)
