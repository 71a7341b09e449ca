"""``det-ds checkpoint show|verify|diff`` of real engines' checkpoints: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import at
from tests.package import checkpoints, reseal

SHAPES = {"weight": [1, 4], "bias": [1]}


def invoke(*words: str | Path) -> Any:
    done = CliRunner().invoke(main, ["checkpoint", *map(str, words)])
    assert "Traceback" not in done.output
    return done


def answer(*words: str | Path) -> Any:
    done = invoke(*words, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_show_names_every_tensor(trained: Path) -> None:
    newest = checkpoints(trained / "run")[0]
    shown = invoke("show", trained / "run")
    assert shown.exit_code == 0, shown.output
    strategy = "  strategy    zero_stage 1, precision fp32, "
    for words in (
        f"checkpoint {newest.name}",
        "  steps       6 (",
        strategy,
        "5 parameters, AdamW",
        "exp_avg",
    ):
        assert words in shown.stdout
    best = json.loads((trained / "run/result.json").read_text())["best"]
    found = answer("show", "best", "--run-dir", trained / "run")
    assert (found["uuid"], found["steps_completed"]) == (best["checkpoint"], best["steps_completed"])
    assert found["strategy"]["zero_stage"] == 1
    (engine,) = found["engines"]
    assert {tensor["name"]: tensor["shape"] for tensor in engine["tensors"]} == SHAPES
    assert found["bytes"] == sum(found["files"].values()) > engine["bytes"] > 0


def test_what_a_script_wrote_is_shown_by_its_files(tmp_path: Path) -> None:
    path = tmp_path / "a-uuid"
    for name in ("checkpoint-8/model.safetensors", "checkpoint-8/optimizer.pt"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(bytes(2048))
    (path / "metadata.json").write_text('{"steps_completed": 8}')
    reseal(path)
    shown = invoke("show", path)
    assert shown.exit_code == 0, shown.output
    assert "strategy    unknown" in shown.stdout
    assert "checkpoint-8/optimizer.pt       2 KiB" in shown.stdout
    refused = invoke("diff", path, path)
    assert refused.exit_code == 1
    assert "a loop of this library did not write it" in refused.stderr
    (path / "manifest.json").unlink()
    (found,) = answer("verify", path)["checkpoints"]
    assert found["state"] == "unverified", "nothing is called intact that cannot be verified"


def test_verify_names_damaged_files_and_has_its_exit_code(copied: Path) -> None:
    there = copied / "run"
    done = invoke("verify", there)
    assert done.exit_code == 0, done.output
    listed = [line.split()[:2] for line in done.stdout.splitlines()]
    assert listed == [["intact", path.name] for path in checkpoints(there)]
    damaged = at(there, 4)
    file = next(file for file in sorted(damaged.glob("model0/*")) if file.stat().st_size > 5)
    file.write_bytes(b"short")
    done = invoke("verify", there, "last", "--run-dir", there)
    assert done.exit_code == 1
    assert f"damaged    {damaged.name}" in done.stdout
    assert f"model0/{file.name} has 5 bytes" in done.stdout
    assert invoke("verify", "last", "--run-dir", there).exit_code == 0
    (damaged / "trial_state.json").unlink()
    newest, found, *_ = answer("verify", there)["checkpoints"]
    assert (newest["state"], found["state"]) == ("intact", "damaged")
    assert [each.split()[0] for each in found["damages"]] == [f"model0/{file.name}", "trial_state.json"]
    assert (newest["damages"], newest["files"] > 5) == ([], True)


def test_diff_shows_the_tensors_that_differ(trained: Path) -> None:
    there = trained / "run"
    equal = invoke("diff", at(there, 6).name, "last", "--run-dir", there)
    assert (equal.exit_code, "all tensors are equal" in equal.stdout) == (0, True), equal.output
    done = invoke("diff", at(there, 2), there)
    assert done.exit_code == 1
    assert "2 tensors with differences" in done.stdout
    found = answer("diff", at(there, 2), there)
    assert (found["equal"], found["compared"]) == (False, "tensors")
    assert invoke("diff", there, "nowhere").exit_code == EXIT_CONFIG
