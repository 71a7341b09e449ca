"""Every tool shows the same names at the same steps; a resumed run is one run: read back by the tools' own readers."""

from __future__ import annotations

import math
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.launches import RESUME, Launch
from determined_ds.protocol.run_dir import RunDir
from determined_ds.runtime.logs.identity import RunHere, shown_run
from determined_ds.runtime.logs.sender import TeamTools
from tests.ranks import ROOT
from tests.runtime.logs.reading import (
    comet_archives,
    csv_rows,
    mlflow_points,
    mlflow_run,
    points_of,
    scalars,
    serving_mlflow,
    wandb_runs,
)

LAUNCH = Launch(
    time=0.0,
    name="tiny",
    runs="trial:TinyTrial",
    hyperparameters={"learning_rate": 0.1, "logging": {"csv": {}}},
    ds_config={"zero_optimization": {"stage": 1}},
    origins={"zero_optimization.stage": "const.yaml:14"},
    versions={"torch": "2.13.0"},
)
EXPERIMENT = {"labels": ["one", "two"], "description": "a description"}
TOOLS: dict[str, dict[str, Any]] = {
    "wandb": {"mode": "offline", "tags": ["mine"]},
    "mlflow": {},
    "comet": {"online": False},
    "csv": {},
    "tensorboard": {},
}
KEY = "0123456789abcdef0123456789abcdef01234567"
LOSS, VALIDATION = "training/loss", "validation/accuracy/top5"
# The first start trains five batches, the second one continues from the third.
FIRST, SECOND = [1, 2, 3, 4, 5], [4, 5, 6]


@pytest.fixture(scope="module")
def mlflow_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_mlflow(tmp_path_factory.mktemp("mlflow")) as url:
        yield url


class Trained:
    """A run directory after two starts of one run, all tools on.

    Args:
        path: The run directory.
        server: Of MLflow.
    """

    def __init__(self, path: Path, server: str) -> None:
        self.path = path
        self.server = server
        path.mkdir()
        self.train(LAUNCH, FIRST)
        self.train(
            replace(LAUNCH, kind=RESUME, steps_completed=3, hyperparameters={"learning_rate": 0.2}), SECOND
        )
        self.key, _ = RunHere(there=RunDir(path)).key(replace(LAUNCH, kind=RESUME))

    def train(self, launch: Launch, steps: list[int]) -> None:
        tools = {**TOOLS, "mlflow": {"tracking_uri": self.server, "tags": {"team": "vision"}}}
        run = RunHere(there=RunDir(self.path))
        about = partial(
            shown_run,
            run=run,
            exp_conf=EXPERIMENT,
            tools=tools,
            folder=self.path,
            events=self.path / "events",
        )
        sink = TeamTools(about, self.path / "logging.log")
        sink.begin(launch)
        for step in steps:
            sink.report("training", step, {"loss": math.nan if step == 2 else 1 / step, "name": "text"})
        sink.report("validation", steps[-1], {"accuracy": {"top5": 0.5}, "of_class": [0.25, 0.75]})
        sink.end("completed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, mlflow_server: str) -> Iterator[Trained]:
    with pytest.MonkeyPatch.context() as patch:
        for name in ("WANDB_API_KEY", "COMET_API_KEY"):
            patch.setenv(name, KEY)
        yield Trained(tmp_path_factory.mktemp("tools") / "run", mlflow_server)


def losses(steps: list[int]) -> list[Any]:
    return [(step, pytest.approx(math.nan if step == 2 else 1 / step, nan_ok=True)) for step in steps]


def test_wandb_has_one_run_whose_batches_are_its_steps(trained: Trained) -> None:
    first, second = wandb_runs(trained.path)
    assert first["id"] == second["id"] == trained.key
    assert (first["project"], first["name"], first["tags"]) == ("tiny", "tiny run", ["one", "two", "mine"])
    for run, steps in ((first, FIRST), (second, SECOND)):
        assert points_of(run["rows"], LOSS, "batches") == losses(steps)
        assert points_of(run["rows"], LOSS, "_step") == losses(steps)
        assert points_of(run["rows"], VALIDATION, "batches") == [(steps[-1], 0.5)]
        assert points_of(run["rows"], "validation/of_class/1", "batches") == [(steps[-1], 0.75)]
        assert (run["summary"]["status"], run["exit_code"]) == ("completed", 0)


def test_its_configuration_says_where_values_came_from(trained: Trained) -> None:
    first, second = wandb_runs(trained.path)
    assert first["config"]["hyperparameters"] == {"learning_rate": 0.1}
    assert first["config"]["deepspeed"] == {"zero_optimization": {"stage": 1}}
    assert first["config"]["origins"] == {"zero_optimization.stage": "const.yaml:14"}
    assert first["config"]["versions"] == {"torch": "2.13.0"}
    assert second["config"]["hyperparameters"] == {"learning_rate": 0.2}
    assert (second["config"]["kind"], second["config"]["steps_completed"]) == ("resume", 3)


def test_mlflow_has_one_run_that_says_from_which_batch_it_continued(trained: Trained) -> None:
    client, run = mlflow_run(trained.server, "tiny", trained.key)
    assert mlflow_points(client, run, LOSS) == losses(FIRST + SECOND)
    assert mlflow_points(client, run, VALIDATION) == [(5, 0.5), (6, 0.5)]
    assert run.info.status == "FINISHED"
    tags = run.data.tags
    assert tags["determined_ds.continued_from_batch"] == "3"
    assert (tags["team"], tags["determined_ds.labels"]) == ("vision", "one, two")
    params = run.data.params
    assert (params["hyperparameters.learning_rate"], tags["changed.hyperparameters.learning_rate"]) == (
        "0.1",
        "0.2",
    )
    assert params["origins.zero_optimization.stage"] == "const.yaml:14"
    assert params["deepspeed.zero_optimization.stage"] == "1"


def test_comet_has_an_archive_a_start_of_one_experiment(trained: Trained) -> None:
    first, second = comet_archives(trained.path / "comet", trained.key)
    for archive, steps in ((first, FIRST), (second, SECOND)):
        assert archive["experiment"]["offline_id"] == trained.key
        assert archive["experiment"]["resume_strategy"] == "get_or_create"
        assert archive["metrics"][LOSS] == losses(steps)
        assert archive["others"]["status"] == "completed"
    assert first["parameters"]["deepspeed.zero_optimization.stage"] == 1
    assert "continued from batch" not in first["others"]
    assert second["others"]["continued from batch"] == 3


def test_the_csv_file_goes_back_to_where_the_run_continues(trained: Trained) -> None:
    rows = csv_rows(trained.path / "metrics.csv")
    assert points_of(rows, LOSS, "batches") == losses([1, 2, 3, 4, 5, 6])
    assert points_of(rows, VALIDATION, "batches") == [(6, 0.5)]
    assert "training/name" not in rows[0]  # no number


def test_tensorboard_drops_what_is_trained_again(trained: Trained) -> None:
    assert scalars(trained.path / "events", LOSS) == losses([1, 2, 3, 4, 5, 6])
    assert scalars(trained.path / "events", VALIDATION) == [(6, 0.5)]


def test_a_fork_and_a_new_run_have_another_key(trained: Trained, tmp_path: Path) -> None:
    here = RunHere(there=RunDir(tmp_path))
    first, is_known = here.key(LAUNCH)
    assert (is_known, first != trained.key) == (False, True)
    assert here.key(replace(LAUNCH, kind=RESUME)) == (first, True)
    assert here.key(replace(LAUNCH, kind="restart")) == (first, True)
    assert here.key(replace(LAUNCH, kind="fork"))[0] != first


def test_the_key_of_a_tool_is_in_no_file(trained: Trained) -> None:
    for file in trained.path.rglob("*"):
        if file.is_file() and not file.is_symlink():
            content = file.read_bytes()
            assert KEY.encode() not in content, file
            if file.suffix == ".zip":
                with zipfile.ZipFile(file) as archive:
                    assert all(KEY.encode() not in archive.read(name) for name in archive.namelist())


def test_a_trial_of_a_search_belongs_to_it() -> None:
    path = Path("runs/tiny/20260101-000000/trials/0003")
    assert RunHere(there=RunDir(path)).group == "20260101-000000"
    assert RunHere(there=RunDir(Path("runs/tiny/20260101-000000"))).group == ""


def test_no_client_fails_and_none_of_them_loads_torch(trained: Trained) -> None:
    assert "Traceback" not in (trained.path / "logging.log").read_text()
    program = (
        "import sys, wandb, comet_ml, mlflow.tracking; import determined_ds.runtime.logs.tools_process as p; "
    )
    program += "p.make_tool; assert not {'torch', 'determined'} & sys.modules.keys()"
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)
