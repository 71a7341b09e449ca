"""The mistakes that people make: each is refused with exit 2 and one message with its fix, and no traceback.

Most are found before a rank is started: a run that is refused leaves no file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.harness.command import det_ds

EXPERIMENT, JSON, TRIAL = "experiment.yaml", "ds.json", "trial.py"
RUN = (EXPERIMENT, ".")

Edit = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, made in a copy of ``own_model``.

    Args:
        edit: What is done to the context directory first.
        arguments: Of ``det-ds run``, started in the context directory.
        says: What the message must contain: the key or file at fault, its value, what is wrong with it.
        fix: What it must advise.
        num_errors: Errors that are named; all that is wrong is said at once.
    """

    edit: Edit = lambda _: None
    arguments: tuple[str, ...] = RUN
    says: tuple[str, ...]
    fix: str
    num_errors: int = 1


def replaced(name: str, old: str, new: str) -> Edit:
    """A file with one passage changed."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert text.count(old) == 1, (name, old)
        (folder / name).write_text(text.replace(old, new))

    return edit


def setting(*overrides: str) -> tuple[str, ...]:
    return (*RUN, *(word for override in overrides for word in ("--set", override)))


def complete_checkpoint(run_dir: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / run_dir / "checkpoints" / "11111111-2222-3333-4444-555555555555"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"steps_completed": 7}')

    return edit


MISTAKES = {
    # The command line
    "no-config": Mistake(arguments=(), says=("Missing argument 'CONFIG'",), fix="det-ds run --help"),
    "config-missing": Mistake(
        arguments=("experiments.yaml", "."), says=("experiments.yaml", "no such file"), fix=EXPERIMENT
    ),
    "arguments-swapped": Mistake(
        arguments=(".", EXPERIMENT),
        says=(f"CONTEXT_DIR = '{EXPERIMENT}'", "is a folder, not a file"),
        fix=f"in . there is: ds.json, {EXPERIMENT}",
        num_errors=2,
    ),
    "context-missing": Mistake(
        arguments=(EXPERIMENT, "model"),
        says=("CONTEXT_DIR = 'model'", "no such folder"),
        fix="folder that holds",
    ),
    "slots-no-number": Mistake(
        arguments=(*RUN, "--slots", "abc"), says=("'--slots'", "'abc'"), fix="det-ds run --help"
    ),
    "accelerator-absent": Mistake(
        arguments=(*RUN, "--accelerator", "cuda"),
        says=("accelerator = 'cuda'", "no CUDA"),
        fix="--accelerator cpu",
    ),
    "resume-of-what": Mistake(
        arguments=(*RUN, "--resume"), says=("--resume", "--run-dir"), fix="add the --run-dir"
    ),
    "resume-of-what-there-is": Mistake(
        edit=complete_checkpoint("runs/tiny/20260101-000000"),
        arguments=(*RUN, "--resume"),
        says=("--resume", "--run-dir"),
        fix="add --run-dir runs/tiny/20260101-000000",
    ),
    "resume-without-checkpoint": Mistake(
        arguments=(*RUN, "--resume", "--run-dir", "empty"),
        says=("--run-dir = 'empty'", "no complete checkpoint"),
        fix="without --resume",
    ),
    "run-dir-holds-a-run": Mistake(
        edit=complete_checkpoint("earlier"),
        arguments=(*RUN, "--run-dir", "earlier"),
        says=("--run-dir = 'earlier'", "holds a run already, trained to batch 7"),
        fix="--resume",
    ),
    "run-dir-is-a-file": Mistake(
        arguments=(*RUN, "--run-dir", TRIAL),
        says=(f"--run-dir = '{TRIAL}'", "is a file"),
        fix="can be written to",
    ),
    # One mistake for each room that judges the files; all others are tested there.
    "yaml": Mistake(
        edit=replaced(EXPERIMENT, "{batches: 6}", "{batches: 6"),
        says=(f"{EXPERIMENT}:1", "is not YAML"),
        fix="fix the YAML",
    ),
    "experiment": Mistake(
        edit=replaced(EXPERIMENT, "hyperparameters:", "hyperparameter:"),
        says=(f"hyperparameter ({EXPERIMENT}:5)", "unknown key"),
        fix="'hyperparameters'",
    ),
    "hyperparameters": Mistake(
        edit=replaced(EXPERIMENT, "global_batch_size: 8", 'global_batch_size: "8"'),
        says=(f"global_batch_size = '8' ({EXPERIMENT}:6)", "must be an integer, not a string"),
        fix="remove the quotes: 8",
    ),
    "entrypoint": Mistake(
        edit=replaced(EXPERIMENT, "trial:TinyTrial", "trial:TinyTrail"),
        says=("trial:TinyTrail", "has no TinyTrail"),
        fix="did you mean TinyTrial?",
    ),
    "path-of-the-json": Mistake(
        edit=replaced(EXPERIMENT, JSON, "zero1.json"),
        says=("deepspeed_config = 'zero1.json'", "no such file in the context directory"),
        fix=f"there are: {JSON}",
    ),
    "json": Mistake(
        edit=replaced(JSON, '"stage": 1', '"stage": 1,'),
        says=(f"{JSON}:6", "is not JSON"),
        fix="remove the comma",
    ),
    "deepspeed": Mistake(
        edit=replaced(JSON, '"zero_optimization"', '"zero_optimisation"'),
        says=(f"zero_optimisation ({JSON}:5)", "unknown key"),
        fix="'zero_optimization'",
    ),
    "package": Mistake(
        edit=replaced(JSON, '"AdamW"', '"MuAdamW"'),
        says=("optimizer.type = 'MuAdamW'", "needs the package mup"),
        fix="pip install 'mup'",
    ),
    "tool": Mistake(
        arguments=setting("hyperparameters.logging.wandb.projct=x"),
        says=("hyperparameters.logging.wandb.projct", "unknown key"),
        fix="did you mean 'project'?",
    ),
    "two-names": Mistake(
        arguments=setting("hyperparameters.pipe_parallel_size=1", "hyperparameters.pipeline_parallel_size=2"),
        says=("hyperparameters.pipeline_parallel_size = 2", "another name of pipe_parallel_size"),
        fix="keep pipe_parallel_size only",
    ),
    "rules": Mistake(
        arguments=setting(
            "hyperparameters.pipe_parallel_size=2",
            "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=2",
        ),
        says=("zero_optimization.stage = 2 (--set", "pipe_parallel_size 2"),
        fix="set zero_optimization.stage to 1",
    ),
    "three-at-once": Mistake(
        arguments=(*setting("hyperparameters.fit.max_length=null"), "--slots", "3", "--run-dir", TRIAL),
        says=("fit.max_length", "global_batch_size = 8", "--run-dir"),
        fix="6 or 9",
        num_errors=3,
    ),
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no GPU here, and nothing says what to compute on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def run_here(*arguments: str) -> Result:
    """``det-ds run`` in this process; an ``--accelerator`` among the arguments wins over the CPU."""
    words = ["run", "--accelerator", "cpu", *arguments]
    return CliRunner().invoke(main, words, prog_name="det-ds")


def files_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_refused_before_a_rank_is_started(
    mistake: Mistake, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    mistake.edit(own_model)
    before = files_in(own_model)

    result = run_here(*mistake.arguments)

    assert result.exit_code == EXIT_CONFIG, result.output
    assert result.stdout == ""
    for words in (*mistake.says, mistake.fix):
        assert words in result.stderr
    assert len(re.findall(r"^error: ", result.stderr, flags=re.I | re.M)) == mistake.num_errors, result.stderr
    assert "Traceback" not in result.stderr
    assert files_in(own_model) == before, "a refused run leaves nothing"


@pytest.mark.parametrize("when", ["known", "tried"])
def test_a_run_dir_that_cannot_be_written_to(
    when: str, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    if when == "known":
        monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    else:  # permission is one thing; a full or broken disk shows only in the attempt

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "mkdir", refuse)
    result = run_here(*RUN, "--run-dir", "new/run")
    assert result.exit_code == EXIT_CONFIG, result.output
    assert "--run-dir = 'new/run'" in result.stderr
    assert "give a --run-dir that can be written to" in result.stderr
    assert "Traceback" not in result.stderr


# ----------------------------------------------------------------------------- what only the ranks can know


def test_what_every_rank_refuses_is_said_once(own_model: Path) -> None:
    with_another_size = "DataLoader(samples(64, seed=1), batch_size=3)"
    replaced(TRIAL, "self.training_loader(samples(64, seed=1))", with_another_size)(own_model)
    done = det_ds("run", own_model / EXPERIMENT, own_model, "--run-dir", own_model / "run")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stderr.count("build_training_data_loader = 3") == 1
    assert "fix: use self.training_loader(dataset)" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
