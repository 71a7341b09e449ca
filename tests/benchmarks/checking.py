"""What ``det-ds check`` costs: beside ``det --version``, and over grids of many points.

    make bench

All are processes of their own, started in turns, so that a machine that drifts drifts for all of them.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.command import DET_DS, ROOT

TURNS = 21
GRID_TURNS = 5
DET = Path(sys.executable).with_name("det")
CONST = ROOT / "experiments/gpt2/const.yaml"
HEAD = """
name: grid
entrypoint: python3 -m determined.launch.deepspeed python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial
resources: {{slots_per_trial: {slots}}}
searcher: {{name: grid, metric: validation_loss}}
hyperparameters:
  deepspeed_config: experiments/deepspeed/zero1.json
  warmup_num_steps: 1
  fit: {{max_length: {{batches: 10}}}}
"""
RUNNABLE = """
  global_batch_size: {type: int, minval: 1, maxval: 100, count: 100}
  learning_rate: {type: double, minval: 0.001, maxval: 0.01, count: 25}
  overwrite_deepspeed_args: {zero_optimization: {stage: {type: categorical, vals: [0, 1, 2, 3]}}}
"""
FAILING = """
  global_batch_size: {{type: int, minval: 8, maxval: {last}, count: {sizes}}}
  learning_rate: {{type: double, minval: 0.001, maxval: 0.01, count: 5}}
  overwrite_deepspeed_args:
    train_micro_batch_size_per_gpu: {{type: categorical, vals: [1, 2, 3, 4, 5]}}
    zero_optimization: {{stage: {{type: categorical, vals: [0, 1, 2, 3]}}}}
"""
# No two points of a grid have the same in all that decides a run.
GRIDS = {
    "10,000 points, all can run": HEAD.format(slots=1) + RUNNABLE,
    "10,000 points, 94 % cannot": HEAD.format(slots=8) + FAILING.format(last=107, sizes=100),
    "100,000 points, 94 % cannot": HEAD.format(slots=8) + FAILING.format(last=1007, sizes=1000),
}


def seconds_of(*command: str | Path) -> tuple[float, float]:
    """What a process takes from its start to its end: seconds on the clock, and on a processor."""
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run([str(word) for word in command], cwd=ROOT, capture_output=True, text=True)
    took = time.perf_counter() - started
    assert done.returncode == 0, done.stdout + done.stderr
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def table() -> str:
    """Measure, and return the table."""
    commands: dict[str, tuple[str | Path, ...]] = {
        "`det --version`": (DET, "--version"),
        "`det-ds check experiments/gpt2/const.yaml`": (DET_DS, "check", CONST),
    }
    with tempfile.TemporaryDirectory() as folder:
        for number, (name, text) in enumerate(GRIDS.items()):
            file = Path(folder, f"grid_{number}.yaml")
            file.write_text(text)
            commands[name] = (DET_DS, "check", "--context", ROOT, file)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in commands}
        for turn in range(TURNS + 1):
            for name, command in commands.items():
                if name in GRIDS and turn > GRID_TURNS:
                    continue
                taken = seconds_of(*command)
                if turn:  # the first one warms up
                    found[name].append(taken)
    rows = ["| | s on the clock | s on a processor | against `det --version` |", "|---|---|---|---|"]
    first = next(iter(found.values()))
    for name, taken in found.items():
        clock, processor = (statistics.median(figures) for figures in zip(*taken, strict=True))
        ratios = [mine[0] / theirs[0] for mine, theirs in zip(taken, first, strict=False)]
        against = "" if name in GRIDS else f"{statistics.median(ratios):.2f}"
        rows.append(f"| {name} | {clock:.2f} | {processor:.2f} | {against} |")
    return "\n".join(rows)
