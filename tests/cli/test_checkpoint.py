"""``det-ds checkpoint show|verify|diff`` of real engines' checkpoints: what they print, and their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from determined_ds.errors import EXIT_CONFIG
from tests.checkpoints.command import checkpoint
from tests.cli.own_runs import at, result
from tests.package import checkpoints, reseal


def answer(*words: str | Path) -> Any:
    done = checkpoint(*words, "--json")
    assert done.exit_code in (0, 1), done.output
    return json.loads(done.stdout)


def test_show_names_every_tensor_and_what_a_script_wrote_by_its_files(trained: Path, tmp_path: Path) -> None:
    shown = checkpoint("show", trained / "run").stdout
    for words in (checkpoints(trained / "run")[0].name, "zero_stage 1, precision fp32", "AdamW", "exp_avg"):
        assert words in shown
    found = answer("show", "best", "--run-dir", trained / "run")
    assert found["uuid"] == result(trained / "run")["best"]["checkpoint"]
    (engine,) = found["engines"]
    tensors = {tensor["name"]: tensor["shape"] for tensor in engine["tensors"]}
    assert tensors == {"weight": [1, 4], "bias": [1]}
    path = tmp_path / "a-uuid"
    (path / "checkpoint-8").mkdir(parents=True)
    (path / "checkpoint-8/optimizer.pt").write_bytes(bytes(2048))
    (path / "metadata.json").write_text('{"steps_completed": 8}')
    reseal(path)
    assert "checkpoint-8/optimizer.pt" in checkpoint("show", path).stdout
    assert "a loop of this library did not write it" in checkpoint("diff", path, path).stderr
    (path / "manifest.json").unlink()
    (found,) = answer("verify", path)["checkpoints"]
    assert found["state"] == "unverified", "nothing is called intact that cannot be verified"


def test_verify_names_damaged_files_and_has_its_exit_code(copied: Path) -> None:
    there = copied / "run"
    done = checkpoint("verify", there)
    assert done.exit_code == 0, done.output
    assert f"  {len(answer('show', 'last', '--run-dir', there)['files'])} files, " in done.stdout
    listed = [line.split()[:2] for line in done.stdout.splitlines()]
    assert listed == [["intact", path.name] for path in checkpoints(there)]
    damaged = at(there, 4)
    file = next(file for file in sorted(damaged.glob("model0/*")) if file.stat().st_size > 5)
    file.write_bytes(b"short")
    (damaged / "trial_state.json").unlink()
    done = checkpoint("verify", there, "last", "--run-dir", there)
    assert (done.exit_code, f"damaged    {damaged.name}" in done.stdout) == (1, True)
    assert checkpoint("verify", "last", "--run-dir", there).exit_code == 0
    newest, found, *_ = answer("verify", there)["checkpoints"]
    assert (newest["state"], newest["damages"], found["state"]) == ("intact", [], "damaged")
    assert [each.split()[0] for each in found["damages"]] == [f"model0/{file.name}", "trial_state.json"]


def test_diff_shows_the_tensors_that_differ(trained: Path) -> None:
    there = trained / "run"
    equal = checkpoint("diff", at(there, 6).name, "last", "--run-dir", there)
    assert (equal.exit_code, "all tensors are equal" in equal.stdout) == (0, True), equal.output
    done = checkpoint("diff", at(there, 2), there)
    assert (done.exit_code, "2 tensors with differences" in done.stdout) == (1, True)
    assert checkpoint("diff", there, "nowhere").exit_code == EXIT_CONFIG
