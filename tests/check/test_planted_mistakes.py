"""Each planted mistake is found, once, on its line, with a fix that works."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.check.planted import PLANTED, Mistake
from tests.harness.checked import Found, findings


def write_over(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def found_in(project: Path, mistake: Mistake) -> tuple[Found, list[Found]]:
    """The finding on the line of the mistake, and the others."""
    checked = mistake.checked or mistake.file
    assert findings(checked) == []
    write_over(project / mistake.file, mistake.right, mistake.wrong)
    at = (mistake.at or mistake.wrong.splitlines()[0]).strip()
    named_in = mistake.named_in or mistake.file
    lines = (project / named_in).read_text().splitlines()
    line = next(number for number, content in enumerate(lines, 1) if at in content)
    every = findings(checked)
    (there,) = [each for each in every if (each.file, each.line) == (named_in, line)]
    return there, [each for each in every if each is not there]


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("mistake", PLANTED.values(), ids=PLANTED.keys())
def test_it_is_found_once_on_its_line_and_its_fix_works(project: Path, mistake: Mistake) -> None:
    """What is found besides is another mistake, which the case names."""
    there, others = found_in(project, mistake)
    assert sorted(each.code for each in others) == sorted(mistake.also)
    assert mistake.says in there.fix
    for edit in mistake.fix():
        new = words(edit.new) - words(edit.old) - words(mistake.wrong) - words(mistake.chosen)
        assert new <= words(there.fix), f"a user cannot know {new} from: {there.fix}"
        write_over(project / edit.file, edit.old, edit.new)
    assert findings(mistake.checked or mistake.file) == []


def test_a_search_is_as_long_as_the_fix_says(project: Path) -> None:
    there, _ = found_in(project, PLANTED["a search without its length"])
    assert "write max_time: 200" in there.fix
