"""What looks like a secret in the files that Determined would send of a context directory."""

from __future__ import annotations

from pathlib import Path

from determined.common import context
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.checked import report_of, reports

TOKEN = "hf_" + "a" * 34


TREE = [
    *("own.py", "data/train.txt", "data/deep/er/more.txt", "notes/keep.md", "notes/drop.md", ".env.example"),
    *("__pycache__/trial.pyc", "sub/.git/config", "terraform/state", "shared_fs/large"),
]
PATTERNS = [
    *("data", "/data/", "data/*", "!data/deep", "*.md", "!keep.md", "/*", "!/notes", "notes/drop.md"),
    *("# no", "", "**/more.txt"),
]


@given(st.lists(st.sampled_from(PATTERNS), max_size=4))
def test_the_files_that_are_looked_into_are_those_that_determined_sends(
    tmp_path: Path, patterns: list[str]
) -> None:
    """Each file of the tree holds a secret."""
    for name, content in {**dict.fromkeys(TREE, TOKEN), ".detignore": "\n".join(patterns)}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    report_of(tmp_path)
    _, *rest = reports(tmp_path / "a.yaml", tmp_path)
    found = [finding for report in rest for finding in report["findings"]]
    assert all((each.code, each.line) == ("secret", 1) and TOKEN not in each.message for each in found)
    sent = {item.path for item in context.read_v1_context(tmp_path)}
    assert {each.file for each in found} == {str(tmp_path / name) for name in TREE if name in sent}
