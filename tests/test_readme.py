"""The READMEs and docs/: every command runs, every block of code or configuration is what it claims to be.

Conventions of the documents: each line of a ``sh`` block is a command; ``text`` blocks are output or schemas. A block
may be a file, which the commands may use (see ``harness/documented.py``).
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from determined.cli import add_args
from determined.cli.cli import all_args_description, make_parser

import determined_ds
from determined_ds.cli.main import main
from tests.harness.command import DET_DS, ROOT, det_ds
from tests.harness.documented import BLOCKS, FILES, PAGES, Block, blocks_of, context_of
from tests.package import own_hyperparameters, records

# Commands that no test runs from here, and what stands for them.
ELSEWHERE = {
    "make": "the targets exist (below); make itself is what runs the tests",
    "det": "its parser takes the arguments (below); tests/cluster runs such commands",
    "docker": "tests/docker lints the Dockerfile and runs its install step",
    "source": "a shell's own",
    "export": "a shell's own",
    ".venv/bin/python": "a run of tests",
}
TIMEOUT_S = 1800.0


def commands_of(block: Block) -> list[str]:
    """Of a ``sh`` block. A line that ends with a backslash continues on the next."""
    if block.language != "sh":
        return []
    return [line for line in re.sub(r"\\\n *", "", block.text).splitlines() if line]


COMMANDS = sorted({command for block in BLOCKS for command in commands_of(block)})
# Within a sentence or a table, with the number of an experiment as ID.
INLINE = sorted(
    {
        re.sub(r"\bID\b", "1", command)
        for page in PAGES
        for command in re.findall(r"`(det(?:-ds)? [a-z][^`]*)`", page.read_text())
        if "NAME" not in command and (len(command.split()) > 3 or command.startswith("det-ds"))
    }
)


def words_of(command: str) -> list[str]:
    return shlex.split(command, comments=True)


def is_run(command: str) -> bool:
    return words_of(command)[0] not in ELSEWHERE


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def run_commands(page: Path, folder: Path) -> None:
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_DATA_HOME": str(folder / "data"),  # where Determined puts checkpoints
        "PATH": f"{DET_DS.parent}{os.pathsep}{os.environ['PATH']}",
    }
    commands = [command for block in blocks_of(page) for command in commands_of(block)]
    for command in filter(is_run, commands):
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


WITH_COMMANDS = [
    page for page in PAGES if any(is_run(each) for block in blocks_of(page) for each in commands_of(block))
]


@pytest.mark.long("runs all that the pages show; that programs take the arguments is proved by a short test")
@pytest.mark.parametrize("page", WITH_COMMANDS, ids=name_of)
def test_the_commands_of_a_page_run(page: Path, tmp_path: Path) -> None:
    run_commands(page, context_of(tmp_path))


@pytest.mark.parametrize("command", [*COMMANDS, *INLINE])
def test_a_command_has_arguments_that_its_program_takes(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, *words = words_of(command)
    monkeypatch.chdir(tmp_path)
    for word in words:  # det opens the file while it parses
        if word == "CONFIG" or (word.endswith(".yaml") and "*" not in word):
            (tmp_path / word).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / word).touch()
    if program == "det-ds":
        subcommand = main.get_command(click.Context(main), words[0])
        context = click.Context(subcommand, info_name=words[0], token_normalize_func=str)
        subcommand.make_parser(context).parse_args(words[1:])
    elif program == "det":
        parser = make_parser()
        add_args(parser, all_args_description)
        parser.parse_args(words)
    elif program == "make":
        assert re.search(rf"^{words[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    else:
        assert program in {*ELSEWHERE, "torchrun", "python3"}


def test_your_own_model_runs_without_a_compiler(tmp_path: Path) -> None:
    folder = context_of(tmp_path)
    options = ("--test", "--run-dir", folder / "run")
    done = det_ds("run", "experiments/mine.yaml", ".", *options, cwd=folder, env={"PATH": "/nowhere"})
    assert done.returncode == 0, done.stderr
    assert "test passed" in done.stdout


@pytest.mark.parametrize("data", ["torch's DataLoader", "stream"])
def test_your_own_model_on_other_data_resumes_where_it_stopped(data: str, tmp_path: Path) -> None:
    """The same trial with torch's own loader, shuffled, or with the stream of the page."""
    folder = context_of(tmp_path)
    if data == "stream":
        trial = "model_defs.mine.streaming:MyStreamingTrial"
    else:
        trial = "model_defs.mine.trial:MyTrial"
        torchs = "torch.utils.data.DataLoader(self.data, batch_size=self.micro_batch_size, shuffle=True)"
        source = FILES["model_defs/mine/trial.py"].replace("self.training_loader(self.data)", torchs)
        (folder / "model_defs/mine/trial.py").write_text(source)
    length = "hyperparameters.fit.max_length.batches=%d"

    def run(name: str, batches: int, *options: str) -> str:
        settings = (f"entrypoint=python3 -m determined_ds.train {trial}", length % batches)
        sets = [word for setting in settings for word in ("--set", setting)]
        done = det_ds(
            "run", folder / "experiments/mine.yaml", folder, "--run-dir", folder / name, *sets, *options
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    run("whole", 40)
    run("stopped", 33)
    assert ("skipping" in run("stopped", 40, "--resume")) == (data == "stream")
    (_, whole), (_, stopped) = (records(folder / name, "validation")[-1] for name in ("whole", "stopped"))
    assert whole["validation_loss"] == stopped["validation_loss"]


def test_what_python_imports_is_there() -> None:
    own = {each.file.removesuffix(".py").replace("/", ".") for each in BLOCKS}
    for block in BLOCKS:
        for node in ast.walk(ast.parse(block.text)) if block.language == "python" else ():
            if isinstance(node, ast.ImportFrom) and node.module not in own:
                module = importlib.import_module(node.module or "")
                missing = [alias.name for alias in node.names if not hasattr(module, alias.name)]
                assert not missing, (name_of(block.page), missing)


def overlaid(base: Any, over: Any) -> Any:
    if not isinstance(base, dict) or not isinstance(over, dict):
        return over
    return {**base, **{key: overlaid(base.get(key), value) for key, value in over.items()}}


def test_det_ds_check_passes_every_experiment_and_json(tmp_path: Path) -> None:
    """A file as it stands; a part of an experiment in place of what a template has."""
    folder = context_of(tmp_path)
    template = yaml.safe_load((ROOT / "experiments/gpt2/const.yaml").read_text())
    files = {folder / name for name in FILES if name.endswith(".yaml")}
    for number, block in enumerate(BLOCKS):
        path = folder / f"experiments/block{number}.{block.language}"
        if block.language == "json":
            path.write_text(block.text)
            files.add(path)
        elif block.language == "yaml" and not block.file and "repos" not in block.text:  # of pre-commit
            path.write_text(yaml.safe_dump(overlaid(template, yaml.safe_load(block.text))))
            files.add(path)
    assert len(files) >= 4
    done = subprocess.run([DET_DS, "check", *files], capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_file_that_a_page_links_to_is_there() -> None:
    """And every heading; pages of docs/ link to no file outside it, since the site has only those."""
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            path, _, heading = link.partition("#")
            if "://" in link:
                continue
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{name_of(page)}: {link}"
            assert page.parent != ROOT / "docs" or target.parent == page.parent, f"{name_of(page)}: {link}"
            assert not heading or heading in headings_of(target), f"{name_of(page)}: {link}"


def headings_of(page: Path) -> set[str]:
    """Anchors as GitHub and mkdocs make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_every_page_is_in_the_navigation_and_every_public_name_in_the_reference() -> None:
    site = (ROOT / "mkdocs.yml").read_text()
    assert [
        page.name for page in PAGES if page.parent == ROOT / "docs" and f": {page.name}\n" not in site
    ] == []
    reference = (ROOT / "docs/architecture.md").read_text()
    assert [name for name in determined_ds.__all__ if name not in reference] == []


def test_every_hyperparameter_is_in_its_reference() -> None:
    """With its section, type, default and meaning."""
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs/hooks.py")
    assert spec is not None
    assert spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.on_page_markdown((ROOT / "docs/configuration.md").read_text())
    page = page[page.index("## All hyperparameters") :]
    rows = {line.split("`")[1]: line.split(" | ") for line in page.splitlines() if line.startswith("| `")}
    units = (".batches", ".epochs", ".seconds", ".minutes", ".hours")  # of lengths, each of which is one row
    assert rows.keys() == {name for name in own_hyperparameters() if not name.endswith(units)}
    assert [name for name, row in rows.items() if len(row) != 4 or not all(row)] == []
    assert "### `logging.wandb`" in page


@pytest.mark.long("the site, built as make docs does, from every docstring of the public names")
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    mkdocs = DET_DS.with_name("mkdocs")
    done = subprocess.run(
        [mkdocs, "build", "--strict", "--site-dir", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert done.returncode == 0, done.stderr
    assert "load_model_from_checkpoint_path" in (tmp_path / "architecture" / "index.html").read_text()
    assert "fit.max_length" in (tmp_path / "configuration" / "index.html").read_text()
