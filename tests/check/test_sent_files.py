"""What would be sent of a context directory, how much that is, and what in it looks like a secret."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from determined.common import constants, context

from determined_ds.check import sent_files as context_dir
from determined_ds.check.sent_files import context_problems, files_sent
from tests.command import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")  # Determined's own


def write(folder: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    return folder


TREE = {
    "trial.py": "x",
    "data/train.txt": "abc",
    "data/deep/er/more.txt": "abcdef",
    "notes/keep.md": "x",
    "notes/drop.md": "x",
    "__pycache__/trial.pyc": "x",
    "sub/.git/config": "x",
    "terraform/state": "x",
    "shared_fs/large": "x",
    ".env.example": "x",
}


@pytest.mark.parametrize(
    "detignore",
    [
        "",
        "data",
        "/data/",
        "data/*\n!data/deep",
        "*.md\n!keep.md",
        "/*\n!/notes\nnotes/drop.md",
        "# no\n\n**/more.txt",
    ],
)
def test_the_files_are_those_that_determined_sends(tmp_path: Path, detignore: str) -> None:
    write(tmp_path, TREE)
    (tmp_path / ".detignore").write_text(detignore)
    ours = {file.name for file in files_sent(tmp_path)}
    theirs = {item.path for item in context.read_v1_context(tmp_path) if (tmp_path / item.path).is_file()}
    assert ours == theirs


def test_this_repository_sends_what_determined_sends() -> None:
    ours = {file.name: file.num_bytes for file in files_sent(ROOT)}
    items = context.read_v1_context(ROOT)
    assert ours.keys() == {item.path for item in items if (ROOT / item.path).is_file()}
    assert context_problems(ROOT) == ([], [])


# What a task, a script and the start-up hook import by name; the rest is imported by them.
IMPORTED_ON_A_CLUSTER = (
    "determined_ds",
    "determined_ds.train",
    "determined_ds.startup",
    "determined_ds.sessions",
    "determined_ds.transformers",
    "determined_ds.callbacks",
    "determined_ds.runtime.loop.fit",
)


def _file_of(module: str) -> str | None:
    path = module.replace(".", "/")
    found = (name for name in (f"{path}.py", f"{path}/__init__.py") if (ROOT / name).is_file())
    return next(found, None)


def _imported_at_once(node: ast.AST) -> Iterator[str]:
    """Modules that a file imports when it is imported itself, not within a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name for alias in child.names)
        elif isinstance(child, ast.ImportFrom) and child.module:
            yield child.module
            yield from (f"{child.module}.{alias.name}" for alias in child.names)
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _imported_at_once(child)


def test_all_that_a_task_imports_is_sent() -> None:
    """A module that .detignore keeps back would end every task before it trains."""
    sent = {file.name for file in files_sent(ROOT)}
    waiting = [name for name in map(_file_of, IMPORTED_ON_A_CLUSTER) if name]
    assert len(waiting) == len(IMPORTED_ON_A_CLUSTER)
    known = dict.fromkeys(waiting, "a task")
    while waiting:
        name = waiting.pop()
        for found in filter(None, map(_file_of, _imported_at_once(ast.parse((ROOT / name).read_text())))):
            if found not in known:
                known[found] = name
                waiting.append(found)
    kept_back = {name: by for name, by in known.items() if name not in sent}
    assert not kept_back, f"not sent, and imported by: {kept_back}"


def test_the_defaults_are_determineds_own() -> None:
    assert set(constants.DEFAULT_DETIGNORE) == context_dir.IGNORED_BY_DEFAULT
    assert context_dir.MAX_CONTEXT_BYTES == constants.MAX_CONTEXT_SIZE


def test_a_link_to_nowhere_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "gone").symlink_to(tmp_path / "nothing")
    (tmp_path / "self").symlink_to(tmp_path)
    assert [file.name for file in files_sent(tmp_path)] == ["self"]  # as an empty folder


def test_too_large_a_context_names_what_is_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_dir, "MAX_CONTEXT_BYTES", 1000)
    write(tmp_path, {"a/small": b"x" * 100, "runs/1/checkpoint": b"x" * 2000, "trial.py": "x"})
    (problem,), _ = context_problems(tmp_path)
    assert problem.code == "context-too-large"
    assert "runs/" in problem.message
    assert "runs/" in problem.fix
    (tmp_path / ".detignore").write_text("runs/\n")
    assert context_problems(tmp_path) == ([], [])


def test_too_many_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(context_dir, "MAX_FILES", 3)
    write(tmp_path, {f"data/{index}": "x" for index in range(4)})
    (tmp_path / "trial.py").write_text("x")
    errors, (problem,) = context_problems(tmp_path)
    assert not errors  # Determined has no such limit; it takes long
    assert "over 3 files" in problem.message
    assert "/data/" in problem.fix


SECRETS = {
    "key.pem": "anything",
    "conf/id_ed25519": "anything",
    ".env": "A=1",
    "credentials.json": "{}",
    "a.py": "KEY = 1\nAWS = 'AKIA" + "ABCDEFGHIJKLMNOP'\n",
    "b.txt": "\nhf_" + "a" * 34 + "\n",
    "c.yaml": "token: ghp_" + "a" * 36,
    "d.md": "x\ny\n-----BEGIN RSA " + "PRIVATE KEY-----\n" + "A" * 64,
    "e.sh": "export WANDB_API_KEY=" + "0" * 40,
}


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_is_shown_with_its_place(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: SECRETS[name]})
    _, (problem,) = context_problems(tmp_path)
    assert problem.code == "secret"
    line = next(
        (at for at, text in enumerate(SECRETS[name].splitlines(), 1) if len(text) > 20 and name[1] == "."), 1
    )
    assert problem.origin == f"{tmp_path / name}:{line}"
    assert f"/{name}" in problem.fix
    (tmp_path / ".detignore").write_text(f"/{name}\n")
    assert context_problems(tmp_path) == ([], [])


@pytest.mark.parametrize(
    "name", ["monkey.py", "keys.txt", "environment.yaml", "tokenizer.json", "credentials.py", "turkey"]
)
def test_an_innocent_name_is_left_alone(tmp_path: Path, name: str) -> None:
    write(tmp_path, {name: "BEGIN PRIVATE KEY hf_short AKIA"})
    assert context_problems(tmp_path) == ([], [])


# -------------------------------------------------------------------------------------------------- links


def test_links_that_leave_the_context_directory_are_warned_of(tmp_path: Path) -> None:
    """Of a file what it leads to is sent; of a folder nothing is, wherever it leads. Others are as good as files."""
    write(tmp_path, {"secret/notes.txt": "mine", "context/trial.py": "x", "context/data/a.txt": "x"})
    folder = tmp_path / "context"
    (folder / "notes.txt").symlink_to(tmp_path / "secret" / "notes.txt")
    (folder / "shared").symlink_to(tmp_path / "secret")
    (folder / "more").symlink_to(folder / "data")
    (folder / "same.txt").symlink_to("data/a.txt")
    errors, warnings = context_problems(folder)
    assert errors == []
    assert [problem.message for problem in warnings] == [
        "more is a link to the folder data, and would be sent as an empty folder",
        f"shared is a link to the folder {tmp_path}/secret, outside the context directory, and would be sent as an "
        "empty folder",
        f"notes.txt is a link to {tmp_path}/secret/notes.txt, outside the context directory, and what is there would be"
        " sent to the cluster",
    ]
    sent = {item.path: item for item in context.read_v1_context(folder)}
    assert sent["notes.txt"].content  # as Determined does it
    assert not [name for name in sent if name.startswith("shared/")]


def test_links_that_are_not_sent_are_not_warned_of(tmp_path: Path) -> None:
    write(tmp_path, {"outside.txt": "x", "context/.detignore": "/here.txt\n"})
    (tmp_path / "context" / "here.txt").symlink_to(tmp_path / "outside.txt")
    assert context_problems(tmp_path / "context") == ([], [])
