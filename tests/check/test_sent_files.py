"""What Determined would send of a context directory: runs, links, and what looks like a secret."""

from __future__ import annotations

from pathlib import Path

from determined.common import context
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.checked import Found, report_of, reports

TOKEN = "hf_" + "a" * 34


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)


def of_context(folder: Path) -> list[Found]:
    """What is found in the context directory of an experiment that checks clean."""
    report_of(folder)
    first, *rest = reports(folder / "a.yaml", folder)
    assert first["findings"] == []
    assert [report["kind"] for report in rest] == ["context"] * len(rest)
    return [finding for report in rest for finding in report["findings"]]


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
    write(tmp_path, {**dict.fromkeys(TREE, TOKEN), ".detignore": "\n".join(patterns)})
    found = of_context(tmp_path)
    assert all((each.code, each.line) == ("secret", 1) and TOKEN not in each.message for each in found)
    looked_into = {each.file for each in found}
    sent = {item.path for item in context.read_v1_context(tmp_path)}
    assert looked_into == {str(tmp_path / name) for name in TREE if name in sent}


def test_runs_are_named(tmp_path: Path) -> None:
    for number in ("1", "2"):
        write(tmp_path, {f"runs/mine/{number}/launches.jsonl": "{}", f"runs/mine/{number}/state": "x"})
    (only,) = of_context(tmp_path)
    assert (only.severity, only.code, only.file) == ("warning", "context-run", str(tmp_path / "runs"))
    write(tmp_path, {".detignore": "runs/\n"})
    assert of_context(tmp_path) == []
