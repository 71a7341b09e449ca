"""``det-ds checkpoint show|verify|diff|prune``: what they print, their exit codes, and checkpoints of real engines."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.protocol.run_lock import RunLock
from tests.checkpoint.making import made, sealed
from tests.cli.conftest import OWN_MODEL
from tests.command import det_ds

METRIC = "validation_loss"


def invoke(*words: str | Path, given: str | None = None) -> Any:
    return CliRunner().invoke(main, ["checkpoint", *map(str, words)], input=given)


def answer(*words: str | Path) -> Any:
    done = invoke(*words, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at batch 2, 4 and 6; 4 is the best."""
    run = tmp_path / "run"
    records = []
    for steps in (2, 4, 6):
        values = np.arange(6.0).reshape(2, 3) + (steps == 6)
        weight = {"weight": ("BF16", values), "fp32": ("F32", values), "exp_avg": ("F32", values)}
        tensors = {"embedding.weight": weight, "position": {"weight": ("I64", np.arange(3))}}
        path = made(
            run / f"checkpoints/at{steps}",
            tensors,
            ranks=2,
            steps=steps,
            aliases={"head.weight": "embedding.weight"},
        )
        config = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}
        written = {"deepspeed_config": config, "hparams": {}, "trial_cls_spec": "trial:Mine"}
        (path / "load_data.json").write_text(json.dumps({**written, "experiment_config": {"name": "mine"}}))
        (path / "trial_state.json").write_text(json.dumps({"epochs_trained": 1}))
        sealed(path, steps)
        records.append({"group": "validation", "steps_completed": steps, "metrics": {METRIC: abs(steps - 4)}})
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in records))
    (run / "experiment.yaml").write_text(f"searcher: {{metric: {METRIC}}}\n")
    return run


def test_show_names_every_tensor(run: Path) -> None:
    shown = invoke("show", run)
    assert shown.exit_code == 0, shown.output
    for words in (
        "checkpoint at6",
        "  steps       6 (1 epoch)",
        "  strategy    ZeRO 2, bf16, batch 8",
        "2 tensors, 6 parameters, AdamW",
        "  embedding.weight = head.weight  2 x 3  bf16",
        "fp32, exp_avg",
    ):
        assert words in shown.stdout
    found = answer("show", "best", "--run-dir", run)
    assert (found["uuid"], found["steps_completed"], found["strategy"]["zero_stage"]) == ("at4", 4, 2)
    (engine,) = found["engines"]
    first, second = engine["tensors"]
    assert (first["name"], first["shape"], first["dtype"]) == ("embedding.weight", [2, 3], "BF16")
    assert first["norm"] == pytest.approx(np.sqrt(np.sum(np.arange(6.0) ** 2)))
    assert first["aliases"] == ["head.weight"]
    assert second["kind"] == "buffer"
    assert found["bytes"] == sum(found["files"].values()) > engine["bytes"] > 0


def test_what_a_script_wrote_is_shown_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a-uuid"
    for name in ("checkpoint-8/model.safetensors", "checkpoint-8/optimizer.pt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes(2048))
    sealed(path, 8)
    shown = invoke("show", path)
    assert shown.exit_code == 0, shown.output
    assert "strategy    unknown" in shown.stdout
    assert "  checkpoint-8/optimizer.pt       2 KiB" in shown.stdout
    refused = invoke("diff", path, path)
    assert refused.exit_code == 1
    assert "a loop of this library did not write it" in refused.stderr


def test_show_takes_a_tenth_of_a_second_and_no_torch(run: Path) -> None:
    """Of a thousand tensors, beside the start of any command."""
    tensor = {state: ("F32", np.zeros(4)) for state in ("weight", "fp32", "exp_avg", "exp_avg_sq")}
    big = made(run / "checkpoints/big", {f"layers.{at}.weight": tensor for at in range(1000)}, ranks=4)
    code = (
        "import sys, time, determined_ds.cli.main as cli; from click.testing import CliRunner;"
        "start = time.process_time();"
        f"done = CliRunner().invoke(cli.main, ['checkpoint', 'show', {str(big)!r}]);"
        "print(done.exit_code, len(done.stdout.splitlines()), time.process_time() - start,"
        " sorted({'torch', 'numpy', 'yaml', 'deepspeed'} & set(sys.modules)))"
    )
    seconds = []
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        exit_code, lines, took, loaded = done.stdout.split(maxsplit=3)
        assert (exit_code, int(lines) > 1000, loaded.strip()) == ("0", True, "[]")
        seconds.append(float(took))
    assert min(seconds) < 0.25, "half of a busy core is left to others"


def test_verify_names_damaged_files_and_has_its_exit_code(run: Path) -> None:
    done = invoke("verify", run)
    assert done.exit_code == 0, done.output
    assert [line.split()[:2] for line in done.stdout.splitlines()] == [
        ["intact", "at6"],
        ["intact", "at4"],
        ["intact", "at2"],
    ]
    (run / "checkpoints/at4/model0/rank1.bin").write_bytes(b"short")
    done = invoke("verify", run, "last", "--run-dir", run)
    assert done.exit_code == 1
    assert "damaged    at4" in done.stdout
    assert "model0/rank1.bin has 5 bytes" in done.stdout
    assert invoke("verify", "last", "--run-dir", run).exit_code == 0
    found = answer("verify", run / "checkpoints/at4")["checkpoints"]
    assert [each["state"] for each in found] == ["damaged"]
    assert found[0]["damages"][0].startswith("model0/rank1.bin")
    missing = invoke("verify", run / "nowhere")
    assert missing.exit_code == EXIT_CONFIG
    assert "there is no such checkpoint" in missing.stderr


def test_diff_shows_the_first_tensor_that_differs(run: Path) -> None:
    equal = invoke("diff", "at2", "best", "--run-dir", run)
    assert (equal.exit_code, "all tensors are equal" in equal.stdout) == (0, True), equal.output
    done = invoke("diff", run / "checkpoints/at2", run)
    assert done.exit_code == 1
    assert "1 tensor with differences" in done.stdout
    text = " ".join(done.stdout.split())
    assert "model0 embedding.weight weight 6 of 6 elements differ [0, 0]" in text
    assert "values 0 / 1" in text
    assert max(map(len, done.stdout.splitlines()[3:])) <= 80
    found = answer("diff", run / "checkpoints/at2", run)
    assert (found["equal"], found["compared"]) == (False, "tensors")
    assert [each["state"] for each in found["differences"]] == ["weight", "fp32", "exp_avg"]
    assert invoke("diff", run / "checkpoints/at2", run, "--tolerance", "1").exit_code == 0
    assert invoke("diff", run, "nowhere").exit_code == EXIT_CONFIG


def test_prune_says_what_goes_asks_and_leaves_the_best_and_the_newest(run: Path) -> None:
    def kept() -> list[str]:
        return [each.uuid for each in checkpoints_in(run / "checkpoints")]

    dry = invoke("prune", run, "--keep", "1", "--dry-run")
    assert (dry.exit_code, kept()) == (0, ["at6", "at4", "at2"])
    lines = [line.split() for line in dry.stdout.splitlines()]
    assert [line[:2] for line in lines[:3]] == [["keep", "at6"], ["keep", "at4"], ["delete", "at2"]]
    assert lines[0][-1] == "newest"
    assert lines[1][-1] == "best"
    assert invoke("prune", run, "--keep", "1", given="n\n").exit_code == 1
    assert len(kept()) == 3
    assert invoke("prune", run, "--keep", "1", "--json").exit_code == EXIT_CONFIG
    with RunLock(run):
        held = subprocess.run(
            [
                sys.executable,
                "-m",
                "determined_ds.cli",
                "checkpoint",
                "prune",
                str(run),
                "--keep",
                "1",
                "--yes",
            ],
            capture_output=True,
            text=True,
        )
    assert held.returncode == EXIT_CONFIG
    assert "is writing to it" in held.stderr
    assert len(kept()) == 3
    done = invoke("prune", run, "--keep", "1", given="y\n")
    assert (done.exit_code, kept()) == (0, ["at6", "at4"]), done.output
    assert (run / "last").resolve().name == "at6"
    assert (run / "best").resolve().name == "at4"
    assert answer("prune", run, "--keep", "1", "--yes")["removed"] == []


@pytest.fixture(scope="module")
def strategies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Runs of the same trial by two ranks under ZeRO 0 and 3."""
    folder = tmp_path_factory.mktemp("strategies")
    for stage in (0, 3):
        override = f"hyperparameters.zero_stage={stage}"
        words = [
            OWN_MODEL / "experiment.yaml",
            OWN_MODEL,
            "--run-dir",
            folder / f"zero{stage}",
            "--set",
            override,
        ]
        done = det_ds("run", *words)
        assert done.returncode == 0, done.stderr
    return {stage: folder / f"zero{stage}" for stage in (0, 3)}


def test_real_engines_are_compared_across_strategies(strategies: dict[int, Path]) -> None:
    """The same training: what differs is the last digit of a sum."""
    zero0, zero3 = (strategies[stage] for stage in (0, 3))
    equal = invoke("diff", zero0, zero3, "--tolerance", "1e-7")
    assert equal.exit_code == 0, equal.output
    assert "all tensors are equal within 1e-07" in equal.stdout
    oldest = checkpoints_in(zero3 / "checkpoints")[-1]
    found = answer("diff", zero0, oldest.path, "--tolerance", "1e-7")["differences"]
    assert {each["tensor"] for each in found} == {"weight", "bias"}
    assert {"fp32", "exp_avg", "exp_avg_sq", "step"} == {each["state"] for each in found}
    (engine,) = answer("show", zero3)["engines"]
    assert {tensor["name"]: tensor["shape"] for tensor in engine["tensors"]} == {
        "weight": [1, 4],
        "bias": [1],
    }
    assert invoke("verify", zero0, zero3).exit_code == 0
