"""The mistakes that people make: each is refused with exit 2 and one message with its fix, and no traceback.

Most are found before a rank is started: a run that is refused leaves no file.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import det_ds

EXPERIMENT, JSON, TRIAL = "experiment.yaml", "ds.json", "trial.py"
RUN = (EXPERIMENT, ".")


class Mistake(NamedTuple):
    """One mistake, made in a copy of ``own_model``."""

    says: tuple[str, ...]  # the key or file at fault, its value, what is wrong with it; and what is advised
    arguments: tuple[str, ...] = RUN  # of ``det-ds run``, started in the context directory
    edit: Callable[[Path], Any] = lambda folder: None  # what is done to the context directory first
    num_errors: int = 1  # all that is wrong is said at once


def replaced(name: str, old: str, new: str) -> Callable[[Path], Any]:
    """A file with one passage changed."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert text.count(old) == 1, (name, old)
        (folder / name).write_text(text.replace(old, new))

    return edit


def setting(*overrides: str) -> tuple[str, ...]:
    return (*RUN, *(word for override in overrides for word in ("--set", f"hyperparameters.{override}")))


def complete_checkpoint(run_dir: str) -> Callable[[Path], Any]:
    def edit(folder: Path) -> None:
        path = folder / run_dir / "checkpoints" / "11111111-2222-3333-4444-555555555555"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"steps_completed": 7}')

    return edit


STAGED = setting("pipe_parallel_size=2", "overwrite_deepspeed_args.zero_optimization.stage=2")
MISTAKES = {
    # The command line
    "slots-no-number": Mistake(("'--slots'", "'abc'", "det-ds run --help"), (*RUN, "--slots", "abc")),
    "config-missing": Mistake(
        ("experiments.yaml", "no such file", "check the path"), ("experiments.yaml", ".")
    ),
    "arguments-swapped": Mistake(
        (f"CONTEXT_DIR = '{EXPERIMENT}'", "is a folder, not a file", "name a YAML or JSON file in it"),
        (".", EXPERIMENT),
        num_errors=2,
    ),
    "accelerator-absent": Mistake(
        ("accelerator = 'cuda'", "no CUDA", "--accelerator cpu"), (*RUN, "--accelerator", "cuda")
    ),
    "resume-of-what": Mistake(
        ("--resume", "--run-dir"),
        (*RUN, "--resume"),
        complete_checkpoint("runs/tiny/20260101-000000"),
    ),
    "resume-without-checkpoint": Mistake(
        ("--run-dir = 'empty'", "no complete checkpoint", "without --resume"),
        (*RUN, "--resume", "--run-dir", "empty"),
    ),
    "run-dir-holds-a-run": Mistake(
        ("--run-dir = 'earlier'", "holds a run already, trained to batch 7", "--resume"),
        (*RUN, "--run-dir", "earlier"),
        complete_checkpoint("earlier"),
    ),
    # One mistake for each room that judges the files; all others are tested there.
    "entrypoint": Mistake(
        ("trial:TinyTrail", "has no TinyTrail", "did you mean TinyTrial?"),
        edit=replaced(EXPERIMENT, "trial:TinyTrial", "trial:TinyTrail"),
    ),
    "json": Mistake(
        ("deepspeed_config = 'zero1.json'", "no such file in the context directory", f"there are: {JSON}"),
        edit=replaced(EXPERIMENT, JSON, "zero1.json"),
    ),
    "rules": Mistake(
        ("stage = 2 (--set", "pipe_parallel_size 2", "set zero_optimization.stage to 1"), STAGED
    ),
    "three-at-once": Mistake(
        ("fit.max_length", "global_batch_size = 8", "--run-dir", "6 or 9"),
        (*setting("fit.max_length=null"), "--slots", "3", "--run-dir", TRIAL),
        num_errors=3,
    ),
}


@pytest.fixture(autouse=True)
def here(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a copy of ``own_model``. There is no GPU, and nothing says what to compute on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.chdir(own_model)
    return own_model


def refused(*arguments: str) -> Result:
    """``det-ds run`` in this process; an ``--accelerator`` among the arguments wins over the CPU."""
    result = CliRunner().invoke(main, ["run", "--accelerator", "cpu", *arguments], prog_name="det-ds")
    assert result.exit_code == EXIT_CONFIG, result.output
    assert "Traceback" not in result.stderr
    return result


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_refused_before_a_rank_is_started(mistake: Mistake, here: Path) -> None:
    mistake.edit(here)
    before = {*here.rglob("*")}
    result = refused(*mistake.arguments)
    assert result.stdout == ""
    assert [words for words in mistake.says if words not in result.stderr] == []
    assert len(re.findall(r"^error: ", result.stderr, flags=re.I | re.M)) == mistake.num_errors, result.stderr
    assert {*here.rglob("*")} == before, "a refused run leaves nothing"


def test_what_only_the_ranks_can_know_is_said_once(here: Path) -> None:
    with_another_size = "DataLoader(samples(64, seed=1), batch_size=3)"
    replaced(TRIAL, "self.training_loader(samples(64, seed=1))", with_another_size)(here)
    done = det_ds("run", here / EXPERIMENT, here, "--run-dir", here / "run")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stderr.count("build_training_data_loader = 3") == 1
    assert "fix: use self.training_loader(dataset)" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
