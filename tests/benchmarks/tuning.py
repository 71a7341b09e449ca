"""What tuning finds, beside everything there is to find, and beside the Hugging Face Trainer.

    python -m tests.benchmarks.tuning FOLDER

About half an hour; what FOLDER holds already is not measured again.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from determined_ds.report.results import Row, load_results, save_results
from determined_ds.tune.autotune import BEST, Autotune, prepare_autotune
from determined_ds.tune.candidates import Candidate
from determined_ds.tune.measurement import merged
from determined_ds.tune.workbench import Request

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Path("experiments/gpt2/const.yaml")
OVER = ("zero_stage", "micro_batch", "pipeline", "precision")
STEPS, WARMUP = 15, 4
AGAIN = 4
TRAINED, REPEAT = 100, 3


def prepared(run_dir: Path, budget: str, over: tuple[str, ...] = OVER) -> Autotune:
    """A tuning of the template."""
    request = Request(
        config=CONFIG, context_dir=Path(), steps=STEPS, warmup=WARMUP, run_dir=run_dir, accelerator="cpu"
    )
    return prepare_autotune(request, metric="samples_per_second", budget=budget, over=over, tolerance=0.05)


def exhaustive(folder: Path) -> list[Row]:
    """Every way there is, measured; and the best of them again, twice, since once may have been luck."""
    tuning = prepared(folder, "1000")
    rows: dict[str, list[Row]] = {}

    def measure(candidate: Candidate) -> None:
        known = rows.setdefault(candidate.name, [])
        known.append(tuning.tuning.measure(candidate, len(known) + 1, lambda _: None))
        print(f"{len(known)}  {candidate.name:<32} {known[-1].median_step_seconds}", flush=True)

    for candidate in tuning.tuning.candidates:
        measure(candidate)
    ranked = sorted(
        tuning.tuning.candidates, key=lambda each: rows[each.name][0].median_step_seconds or math.inf
    )
    for candidate in (*ranked[:AGAIN], *ranked[AGAIN - 1 :: -1]):
        measure(candidate)
    return [merged(each) for each in rows.values()]


def tuned(folder: Path, budget: str, over: tuple[str, ...] = OVER) -> tuple[Autotune, float, float]:
    """A tuning, with the seconds that it took, and the share of a core that coordinating took."""
    tuning = prepared(folder, budget, over)
    started, cpu = time.perf_counter(), time.process_time()
    tuning.run()
    seconds = time.perf_counter() - started
    return tuning, seconds, (time.process_time() - cpu) / seconds


def ours(best: Path, run_dir: Path) -> dict[str, float]:
    """The tuned experiment, trained."""
    command = [sys.executable, "-m", "determined_ds.cli", "run", str(best), ".", "--run-dir", str(run_dir)]
    for override in (
        f"hyperparameters.fit.max_length.batches={TRAINED}",
        f"hyperparameters.fit.validation_period.batches={TRAINED}",
        f"hyperparameters.fit.checkpoint_period.batches={TRAINED}",
    ):
        command += ["--set", override]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    rates = [r["metrics"]["samples_per_second"] for r in records if r["group"] == "training"][1:]
    loss = next(r["metrics"]["validation_loss"] for r in reversed(records) if r["group"] == "validation")
    return {"samples_per_second": statistics.median(rates), "validation_loss": loss}


def theirs(out: Path) -> dict[str, float]:
    """The Hugging Face Trainer with DeepSpeed, trained as long."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m"]
    command += ["tests.benchmarks.huggingface", str(TRAINED), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    null = subprocess.DEVNULL
    subprocess.run(command, cwd=ROOT, check=True, env=environment, stdout=null, stderr=null)
    measured: dict[str, float] = json.loads(out.read_text())
    return measured


def beside_huggingface(best: Path, folder: Path) -> str:
    """Both, in turns."""
    pairs = []
    for turn in range(REPEAT):
        runs = {
            "ours": lambda turn=turn: ours(best, folder / f"ours-{turn}-{int(time.time())}"),
            "theirs": lambda turn=turn: theirs(folder / f"theirs-{turn}.json"),
        }
        names = list(runs) if turn % 2 == 0 else list(runs)[::-1]
        pairs.append({name: runs[name]() for name in names})
        print(pairs[-1], flush=True)
    lines = ["| | samples/s | validation loss, nats a byte |", "|---|---|---|"]
    for name, title in (
        ("theirs", "Hugging Face Trainer with DeepSpeed, its defaults"),
        ("ours", "`best.yaml` of `det-ds autotune`"),
    ):
        rates = [pair[name]["samples_per_second"] for pair in pairs]
        losses = [pair[name]["validation_loss"] for pair in pairs]
        lines.append(
            f"| {title} | {statistics.median(rates):.1f} ({min(rates):.1f} to {max(rates):.1f})"
            f" | {statistics.median(losses):.3f} |"
        )
    ratios = [pair["ours"]["samples_per_second"] / pair["theirs"]["samples_per_second"] for pair in pairs]
    lines.append(f"\nRatio: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}).")
    return "\n".join(lines)


def quality(rows: list[Row], tuning: Autotune, seconds: float, share: float) -> str:
    """The exhaustive table, and where in it the tuning's choice stands."""
    ranked = sorted((row for row in rows if row.is_measured), key=lambda row: row.median_step_seconds or 0.0)
    best, chosen = ranked[0], tuning.tuning.best
    assert chosen is not None
    stands = next(row for row in ranked if row.name == chosen.candidate.name)
    reached = (best.median_step_seconds or 0.0) / (stands.median_step_seconds or 1.0)
    lines = ["| strategy | ms a step | samples/s |", "|---|---|---|"]
    lines += [
        f"| {row.name} | {1000 * (row.median_step_seconds or 0):.0f} | {row.samples_per_second:.1f} |"
        for row in ranked
    ]
    lines.append(
        f"\n`autotune` chose {chosen.candidate.name} after {tuning.tuning.num_trials} runs of {len(rows)} strategies,"
        f" in {seconds / 60:.1f} minutes: {reached:.1%} of the best. It took {share:.2%} of a core to coordinate."
    )
    return "\n".join(lines)


def main(folder: Path) -> None:
    """All of it; prints Markdown."""
    best, *_ = tuned(folder / "all", "12", (*OVER, "attention", "compile", "fused_optimizer"))
    print(beside_huggingface(best.workbench.run_dir / BEST, folder), flush=True)
    kept = folder / "exhaustive.json"
    if kept.exists():
        rows = list(load_results(kept).rows)
    else:
        rows = exhaustive(folder / "exhaustive")
        save_results(replace(prepared(folder / "exhaustive", "1000").results(), rows=tuple(rows)), kept)
    tuning, seconds, share = tuned(folder / "autotune", str(len(rows) // 4))
    print(quality(rows, tuning, seconds, share))


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
