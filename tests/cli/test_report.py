"""``det-ds report --json`` of a run as ``det-ds run`` leaves it; the page: ``tests/report/test_runs.py``."""

from __future__ import annotations

import json
from pathlib import Path

from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.cli.own_runs import losses, result
from tests.package import checkpoints


def test_json_of_a_real_run_has_its_curves_best_origins_and_checkpoints(trained: Path) -> None:
    run = trained / "run"
    (found,) = json.loads(CliRunner().invoke(main, ["report", str(run), "--json"]).stdout)["runs"]
    assert found["status"] == "completed"
    assert found["curves"]["training/loss"]["values"] == list(losses(run).values())
    assert found["best"]["value"] == result(run)["best"]["value"]
    origin = found["configuration"]["DeepSpeed"]["train_batch_size"]["origin"]
    assert origin.startswith("global_batch_size, ")
    kept = {each["uuid"]: each["steps_completed"] for each in found["checkpoints"]}
    assert kept == {path.name: steps for path, steps in zip(checkpoints(run), (6, 4, 2), strict=True)}
