"""What this library costs, as ratios in one run (``make bench``): a step, and a start.

A step stands beside the plain DeepSpeed loop, and beside Determined's own loop, on the same model and data in the same
two ranks; a start beside torchrun's. All are measured in turns, each first as often as the others, so that a machine
that drifts drifts for all of them. A figure is the median of the turns' ratios, with the lowest and the highest.
"""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from determined.pytorch import Batch, DataLoader

from determined_ds import DataParallelTrial, Trainer, open_context
from tests.harness.command import DET_DS, ROOT
from tests.harness.ranks import Ranks
from tests.package import training_data
from tests.session.ports import SCRIPTS, as_it_was

NUM_SAMPLES = 8192
# Name of a step's size -> width of the model, samples of a step on a rank, batches in a turn, batches a report, turns.
# Many short turns: what a machine does to one of them, it does to one of many.
SIZES = {"5 ms": (384, 32, 120, 50, 15), "200 ms": (2048, 384, 6, 5, 15)}
CASES = [(size, zero, accumulation) for size in SIZES for zero in (0, 2) for accumulation in (1, 4)]

# ------------------------------------------------------------------------------------------- in ranks


class Toy(DataParallelTrial):
    """Three layers, and the times at which its batches began."""

    def prepare(self) -> None:
        self.width = int(self.context.get_hparams()["width"])
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(NUM_SAMPLES, self.width, generator=generator)
        self.data = torch.utils.data.TensorDataset(inputs, inputs[:, :1])
        self.starts: list[float] = []

    def build_model(self) -> torch.nn.Module:
        layers = [torch.nn.Linear(self.width, self.width), torch.nn.ReLU()] * 2
        return torch.nn.Sequential(*layers, torch.nn.Linear(self.width, 1))

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        inputs, targets = batch
        return torch.nn.functional.mse_loss(model(inputs), targets)

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
        self.starts.append(time.perf_counter())
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(torch.utils.data.Subset(self.data, range(2 * self.micro_batch_size)))

    def save(self, context: Any, path: Any) -> None:
        """Nothing, while steps are measured: the disk would go on with it through the next turn."""

    def seconds_a_batch(self) -> float:
        """From the first batch's start to the last one's, over the batches between; reports included."""
        starts = self.starts[:: self.resolved.batch.accumulation]
        self.starts = []
        return (starts[-1] - starts[0]) / (len(starts) - 1)


def plain_loop(trial: Toy, num_batches: int) -> None:
    """The loop of DeepSpeed's own documentation."""
    engine, batch = trial.engine, trial.resolved.batch
    split = (batch.replicas, batch.accumulation, batch.micro_batch_size)
    replica = torch.distributed.get_rank()
    data = training_data(trial.build_training_data_loader(), split, replica=replica, seed=0)
    engine.train()
    for micro_batch in itertools.islice(data.batches, num_batches * batch.accumulation):
        trial.starts.append(time.perf_counter())
        loss = trial.loss(engine, micro_batch)
        engine.backward(loss)
        engine.step()


def hparams_of(width: int, samples: int, zero: int, accumulation: int) -> dict[str, Any]:
    ds_config = {
        "gradient_accumulation_steps": accumulation,
        "zero_optimization": {"stage": zero},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
    }
    return {"global_batch_size": samples * 2, "width": width, "deepspeed_config": ds_config}


def in_turns(runs: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """What each returns, turn by turn, another one first each time; the first turn warms up and does not count."""
    found: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(turns + 1):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            value = runs[name]()
            if turn:
                found[name].append(value)
    return found


def steps(size: str, zero: int, accumulation: int, folder: str) -> dict[str, list[float]]:
    """In a rank: seconds a batch of each loop, a figure a turn."""
    from determined.pytorch import deepspeed as det_ds

    from tests.harness.determineds_own import determined_context

    width, samples, num_batches, report_every, turns = SIZES[size]
    hparams = hparams_of(width, samples, zero, accumulation)
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "max_length": Batch(num_batches),
        "reporting_period": Batch(report_every),
        "checkpoint_policy": "none",
    }
    with open_context(hparams=hparams, run_dir=folder, accelerator="cpu") as context:
        plain, ours = Toy(context), Toy(context)
        context.models.pop(0)  # the plain loop's engine is nobody's but its own
        theirs = determined_context(context, hparams)
        determined = Toy(theirs)
        trainers = ((ours, Trainer(ours, context)), (determined, det_ds.Trainer(determined, theirs)))

        def fitted(trial: Toy, trainer: Any, **more: Any) -> float:
            trainer.fit(**options, **more)
            return trial.seconds_a_batch()

        def looped() -> float:
            plain_loop(plain, num_batches)
            return plain.seconds_a_batch()

        return in_turns(
            {
                "plain": looped,
                "ours": lambda: fitted(*trainers[0]),
                "ours, watching for spikes": lambda: fitted(*trainers[0], on_spike={"deviations": 1e6}),
                "determined": lambda: fitted(*trainers[1]),
            },
            turns,
        )


# ------------------------------------------------------------------------------------------- whole programs


def seconds_of(command: list[str | Path], cwd: Path = ROOT) -> float:
    started = time.perf_counter()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return time.perf_counter() - started


def starts(folder: Path) -> dict[str, list[float]]:
    """From the start to the end of a short script in two ranks: plain under torchrun, ported under det-ds run."""
    scripts = folder / "scripts"
    shutil.copytree(SCRIPTS, scripts)
    as_it_was("cifar10", scripts)
    torchrun: list[str | Path] = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "cifar10_plain.py"]
    numbers = itertools.count()

    def ours() -> float:
        words = ["run", "cifar10.yaml", ".", "--accelerator", "cpu", "--run-dir"]
        return seconds_of([DET_DS, *words, folder / f"run{next(numbers)}"], scripts)

    return in_turns({"torchrun": lambda: seconds_of(torchrun, scripts), "det-ds run": ours}, turns=5)


# ------------------------------------------------------------------------------------------- tables


def show(what: str, found: dict[str, list[float]]) -> None:
    """A line: the first one's median in milliseconds, and the others' ratios to it."""
    (first, base), *others = found.items()
    ratios = []
    for name, values in others:
        each = [mine / theirs for mine, theirs in zip(values, base, strict=True)]
        ratios.append(f"{name} / {first} {statistics.median(each):.3f} ({min(each):.3f} to {max(each):.3f})")
    print(f"{what:34} {first} {1e3 * statistics.median(base):7.1f} ms   {'   '.join(ratios)}", flush=True)


def main() -> None:
    """Measure everything, and show each figure as it is known."""
    machine = f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores"
    print(f"{machine}, torch {torch.__version__}; median (lowest to highest)\n", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        show("start to end of a script", starts(folder))
        ranks = Ranks(2, folder / "logs")
        for number, (size, zero, accumulation) in enumerate(CASES):
            found = ranks.run(steps, size, zero, accumulation, str(folder / f"steps{number}"))[0]
            show(f"step of {size}, ZeRO {zero}, accumulation {accumulation}", found)


if __name__ == "__main__":
    from tests import bench

    bench.main()  # ranks find what they call by the name of its module
