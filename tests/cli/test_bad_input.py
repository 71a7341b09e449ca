"""The mistakes that people make: each is refused with exit 2 and one message with its fix, and no traceback."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import edit
from tests.harness.command import det_ds

RUN = ("experiment.yaml", ".")


# Of an option or a file at fault: what the message says, and the arguments of ``det-ds run``.
MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "accelerator-absent": (("accelerator = 'cuda'", "--accelerator cpu"), (*RUN, "--accelerator", "cuda")),
    "resume-without-checkpoint": (("no complete checkpoint",), (*RUN, "--resume", "--run-dir", "empty")),
    "resume-before-config": (("--resume", "before --resume"), ("--resume", *RUN)),
    "run-dir-holds-a-run": (  # an option is taken with underscores, too
        ("--run-dir = 'earlier'", "holds a run already, trained to batch 7", "--resume"),
        (*RUN, "--run_dir", "earlier"),
    ),
    "three-at-once": (
        ("fit.max_length", "global_batch_size = 8", "--run-dir", "6 or 9"),
        (*RUN, "--set", "hyperparameters.fit.max_length=null", "--slots", "3", "--run-dir", "trial.py"),
    ),
}


@pytest.fixture(autouse=True)
def here(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a copy of ``own_model``. There is no GPU, and nothing says what to compute on."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.chdir(own_model)
    return own_model


@pytest.mark.parametrize(("says", "arguments"), MISTAKES.values(), ids=MISTAKES)
def test_refused_before_a_rank_is_started(
    says: tuple[str, ...], arguments: tuple[str, ...], here: Path
) -> None:
    """Also where a launcher adds ``--local_rank``; an ``--accelerator`` among the arguments wins over the CPU."""
    for run_dir in ("earlier", "runs/tiny/20260101-000000"):  # each holds a complete checkpoint
        path = here / run_dir / "checkpoints" / "11111111-2222-3333-4444-555555555555"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"steps_completed": 7}')
    before = {*here.rglob("*")}
    words = ["--local_rank=1", "run", "--accelerator", "cpu", *arguments]
    result = CliRunner().invoke(main, words, prog_name="det-ds")
    assert (result.exit_code, result.stdout) == (EXIT_CONFIG, "")
    assert [said for said in (*says, "fix: ") if said not in result.stderr] == []
    assert "Traceback" not in result.stderr
    assert {*here.rglob("*")} == before, "a refused run leaves nothing"


def test_what_only_the_ranks_can_know_is_said_once(here: Path) -> None:
    with_another_size = "DataLoader(samples(64, seed=1), batch_size=3)"
    edit(here / "trial.py", "self.training_loader(samples(64, seed=1))", with_another_size)
    done = det_ds("run", here / "experiment.yaml", here, "--run-dir", here / "run")
    assert done.returncode == EXIT_CONFIG, done.stderr
    assert done.stderr.count("build_training_data_loader = 3") == 1
    assert "fix: use self.training_loader(dataset)" in done.stderr
    assert "Traceback" not in done.stderr + done.stdout
