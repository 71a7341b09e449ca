"""What runs out is said in one message: what, where, how much there is, the last checkpoint, and the fix."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from determined_ds.protocol.exhausted import exhausted
from tests.command import DET_DS, ROOT, TIMEOUT_S, det_ds
from tests.launch.test_trial_process import EXPERIMENT, TRIAL

TRIALS = """
import os
from pathlib import Path

class Filling(Endless):
    # The run's disk is full once two batches are trained.
    def train_batch(self, dataloader_iter, epoch_idx, batch_idx):
        if batch_idx == 2:
            with open(Path(os.environ["FILL"]) / "filler", "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(512))
                except OSError:
                    pass
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

class WithWorkers(Endless):
    # Batches of a megabyte, which a worker hands over in shared memory.
    def build_training_data_loader(self):
        inputs = torch.randn(64, 4).repeat(1, 2**14)
        return self.training_loader(torch.utils.data.TensorDataset(inputs, inputs[:, :1]), num_workers=2)
    def loss(self, model, batch):
        inputs, targets = batch
        return super().loss(model, (inputs[:, :4], targets))
    build_validation_data_loader = build_training_data_loader
"""


def words(folder: Path, trial: str, run_dir: Path, **fit: object) -> list[str]:
    (folder / "trial.py").write_text(TRIAL + TRIALS)
    config = yaml.safe_load(EXPERIMENT.format(trial=trial, slots=1, batch=8))
    config["hyperparameters"]["fit"].update(fit)
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return ["run", str(folder / "experiment.yaml"), str(folder), "--run-dir", str(run_dir)]


def check_told(done: subprocess.CompletedProcess[str], *said: str) -> None:
    """It failed, and ends with an error of two lines; nothing else is a traceback."""
    assert done.returncode == 1, done.stderr
    error, fix = done.stderr.rstrip().splitlines()[-2:]
    assert error.startswith("error: "), done.stderr
    assert fix.startswith("  fix: ")
    for each in said:
        assert each in error
    assert "Traceback" not in done.stderr, done.stderr


def test_a_checkpoint_that_does_not_fit_is_not_begun(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    """The ones before it are whole, and nothing is left of it."""
    run_dir = small_disk(2**20) / "run"
    done = det_ds(*words(tmp_path, "Endless", run_dir, checkpoint_period={"batches": 1}))
    kept = checkpoints_in(run_dir / "checkpoints")
    assert len(kept) >= 2
    check_told(done, f"no space left on the disk of {run_dir}/checkpoints", "of 1 MiB are free")
    check_told(done, "a checkpoint takes about", f"the last checkpoint is {kept[0].path}")
    assert [damage_of(checkpoint.path) for checkpoint in kept] == [None] * len(kept)
    assert list((run_dir / "checkpoints").glob(".*")) == []


def test_the_first_checkpoint_is_weighed_by_the_model(
    tmp_path: Path, small_disk: Callable[[int], Path]
) -> None:
    large = "class Large(Endless):\n    def build_model(self):\n        return torch.nn.Sequential("
    run_dir = small_disk(4 * 2**20) / "run"
    given = words(tmp_path, "Large", run_dir, checkpoint_period={"batches": 1})
    with (tmp_path / "trial.py").open("a") as file:
        file.write(f"{large}torch.nn.Linear(4, 2**16), torch.nn.Linear(2**16, 1))\n")
    done = det_ds(*given)
    # 6 x 65536 parameters in fp32, and two moments of Adam.
    check_told(done, "a checkpoint takes about 4.5 MiB", "no checkpoint was made yet")


@pytest.mark.parametrize("fit", [{}, {"checkpoint_period": {"batches": 1}}], ids=["metrics", "checkpoint"])
def test_a_disk_that_fills_up(
    tmp_path: Path, small_disk: Callable[[int], Path], fit: dict[str, object]
) -> None:
    run_dir = small_disk(2**20) / "run"
    done = det_ds(*words(tmp_path, "Filling", run_dir, **fit), env={"FILL": str(run_dir.parent)})
    check_told(done, f"no space left on the disk of {run_dir}", "of 1 MiB are free")
    assert (run_dir / "experiment.yaml").stat().st_size > 0


def test_a_disk_that_is_full_before_the_start(tmp_path: Path, small_disk: Callable[[int], Path]) -> None:
    disk = small_disk(64 * 1024)
    (disk / "filler").write_bytes(bytes(64 * 1024))
    done = det_ds(*words(tmp_path, "Endless", disk / "run"))
    assert done.returncode == 2
    assert "cannot be written to: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


def shell(script: str, given: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["sh", "-c", f'{script}exec "$0" "$@"', str(DET_DS), *given, "--accelerator", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )


def test_shared_memory_that_is_full(tmp_path: Path) -> None:
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("a small /dev/shm takes a mount namespace, as root")
    small = 'exec unshare -m sh -c \'mount -t tmpfs -o size=64k none /dev/shm && exec "$0" "$@"\' '
    given = words(tmp_path, "WithWorkers", tmp_path / "run")
    done = shell(small.removesuffix(" ") + ' "$0" "$@"; ', given)
    check_told(done, "no space left in shared memory, /dev/shm", "of 64 KiB are free")


@pytest.mark.long("a run that opens hundreds of files; a short test has the system's words")
def test_too_few_open_files(tmp_path: Path) -> None:
    """By the hard limit; a soft one, which a process may raise, is raised."""
    given = words(tmp_path, "WithWorkers", tmp_path / "run", max_length={"batches": 2})
    done = shell("ulimit -S -n 24; ", given)
    assert done.returncode == 0, done.stderr
    given[-1] = str(tmp_path / "again")
    done = shell("ulimit -n 24; ", given)
    check_told(done, "too many open files: a process may have 24 here")


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/there/file"), "on the disk of /there/file"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), "on the disk of"),
        (
            RuntimeError("unable to write to file </torch_12_34>: No space left on device (28)"),
            "shared memory",
        ),
        (
            RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error. It is possible"),
            "shared memory",
        ),
        (RuntimeError("received 0 items of ancdata"), "too many open files"),
        (OSError(errno.EMFILE, "Too many open files"), "too many open files"),
    ],
)
def test_words_of_the_system_and_of_torch(error: BaseException, said: str, tmp_path: Path) -> None:
    assert said in str(exhausted(error, tmp_path))
    wrapped = ValueError("while that was handled")
    wrapped.__context__ = error
    assert said in str(exhausted(wrapped, tmp_path))


@pytest.mark.parametrize(
    "error",
    [
        ValueError("a mistake"),
        OSError(errno.ENOENT, "No such file or directory"),
        RuntimeError(
            "PytorchStreamWriter failed writing file data/0: file write failed"
        ),  # and the disk is not full
    ],
)
def test_what_is_something_else(error: BaseException, tmp_path: Path) -> None:
    assert exhausted(error, tmp_path) is None


def test_a_reader_that_goes_away_ends_no_run(tmp_path: Path) -> None:
    """A closed terminal, ``| head``: what would be written is dropped."""
    given = words(tmp_path, "Endless", tmp_path / "run", max_length={"batches": 30})
    with subprocess.Popen(
        [str(DET_DS), *given, "--accelerator", "cpu"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) >= 30
