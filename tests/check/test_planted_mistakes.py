"""Each planted mistake is named on its line, with a fix that fixes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.check.inputs import check_files
from determined_ds.check.output import Finding, place
from tests.check.planted import PLANTED, Mistake


def findings(file: str) -> list[Finding]:
    return [finding for report in check_files([Path(file)]) for finding in report.findings]


def write_over(path: Path, old: str, new: str) -> str:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    text = text.replace(old, new)
    path.write_text(text)
    return text


def test_there_are_as_many_as_were_promised() -> None:
    assert len(PLANTED) >= 40


@pytest.mark.parametrize("mistake", PLANTED.values(), ids=PLANTED.keys())
def test_it_is_named_on_its_line_and_the_fix_is_right(project: Path, mistake: Mistake) -> None:
    file, checked = project / mistake.file, mistake.checked or mistake.file
    assert findings(checked) == []

    text = write_over(file, mistake.right, mistake.wrong)
    at = (mistake.at or next(iter(mistake.wrong.splitlines()), "")).strip()
    named_in = mistake.named_in or mistake.file
    lines = enumerate((project / named_in).read_text().splitlines(), 1)
    line = next(number for number, content in lines if at in content)
    found = {place(finding, checked)[:2]: finding.problem.fix for finding in findings(checked)}
    assert (named_in, line) in found, found
    assert mistake.says in found[named_in, line]

    good = text.replace(mistake.wrong, mistake.right if mistake.fixed is None else mistake.fixed, 1)
    file.write_text(good)
    assert findings(checked) == []
