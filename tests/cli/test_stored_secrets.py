"""A run and a search whose configuration has secrets: the trial gets them, and no file of theirs has one."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import yaml

from determined_ds.errors import EXIT_CONFIG
from tests.cli.own_runs import LENGTH, OWN_MODEL, run
from tests.harness.command import det_ds
from tests.package import checkpoints

# What the trial is to find: in its environment, and in the configuration.
TRIAL = """

class SecretiveTrial(TinyTrial):
    def prepare(self):
        import os

        if hasattr(self.context, "wrap_model_engine"):
            assert os.environ["HF_TOKEN"] == "s3cret-1", os.environ.get("HF_TOKEN")
            assert os.environ["DB_PASSWORD"] == "s3cret-4 and s3cret-5"
            given = self.context.get_experiment_config()["environment"]["environment_variables"]
            assert given["cuda"] == ["HF_TOKEN=s3cret-7"]
        assert self.context.get_data_config()["api_key"] == "s3cret-2"
        assert self.context.get_hparams()["hub"]["password"] == "a s3cret-3"
"""
GIVEN = {
    "HF_TOKEN": "s3cret-1",
    "DB_PASSWORD": "s3cret-4 and s3cret-5",
    "SMTP_PASS": "s3cret-6",
    "HF_TOKEN_2": "s3cret-7",  # of another device
    "DET_DS_DATA_API_KEY": "s3cret-2",
    "DET_DS_DATA_SMTP_PASS": "s3cret-8 and s3cret-9",
    "DET_DS_HYPERPARAMETERS_HUB_PASSWORD": "a s3cret-3",
}
OF_CPU = [f"{name}={GIVEN[name]}" for name in ("HF_TOKEN", "DB_PASSWORD", "SMTP_PASS")]
# What stands in the command that is kept -> what was typed.
TYPED = {
    "data.smtp_pass=***": "data.smtp_pass=s3cret-8 and s3cret-9",
    "hyperparameters.hub.password=***": 'hyperparameters.hub.password="a s3cret-3"',
    "environment.environment_variables.cpu=***": f"environment.environment_variables.cpu={json.dumps(OF_CPU)}",
}


@pytest.fixture(scope="module")
def secretive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A context directory, and beside it what its runs leave."""
    folder = tmp_path_factory.mktemp("secretive") / "own_model"
    shutil.copytree(OWN_MODEL, folder)
    with (folder / "trial.py").open("a") as file:
        file.write(TRIAL)
    config = yaml.safe_load((folder / "experiment.yaml").read_text())
    config["entrypoint"] = config["entrypoint"].replace("TinyTrial", "SecretiveTrial")
    config["resources"]["slots_per_trial"] = 1
    config["environment"] = {"environment_variables": {"cpu": OF_CPU, "cuda": ["HF_TOKEN=s3cret-7"]}}
    config["data"] = {"api_key": "s3cret-2", "smtp_pass": "s3cret-8 and s3cret-9"}
    config["hyperparameters"]["hub"] = {"password": "a s3cret-3"}
    (folder / "experiment.yaml").write_text(yaml.safe_dump(config))
    return folder


def files_with_secrets(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and b"s3cret" in path.read_bytes()]


def test_a_run_stores_none_and_resumes_where_they_are_given_again(secretive: Path) -> None:
    """By the environment, or by the configuration that has them. Those that are missing are named, before a start."""
    run_dir = secretive.parent / "run"
    done = run(secretive, run_dir, sets=TYPED.values())
    assert done.returncode == 0, done.stderr
    assert checkpoints(run_dir)
    assert files_with_secrets(run_dir) == []
    [launch] = (run_dir / "launches.jsonl").read_text().splitlines()
    assert all(masked in json.loads(launch)["command"] for masked in TYPED)
    words = ["run", run_dir / "experiment.yaml", secretive, "--run-dir", run_dir, "--resume", "--set"]
    refused = det_ds(*words, f"{LENGTH}=8")
    assert refused.returncode == EXIT_CONFIG
    assert set(re.findall(r"export (\w+)=", refused.stderr)) == GIVEN.keys()
    done = det_ds(*words, f"{LENGTH}=8", env=GIVEN)
    assert done.returncode == 0, done.stderr
    done = run(secretive, run_dir, "--resume", sets=[f"{LENGTH}=10"])
    assert done.returncode == 0, done.stderr
    assert files_with_secrets(run_dir) == []


def test_a_searchs_trials_get_them_and_its_files_have_none(secretive: Path) -> None:
    folder = secretive.parent / "search"
    done = det_ds("search", secretive / "experiment.yaml", secretive, "--run-dir", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (folder / "best.yaml").is_file()
    assert files_with_secrets(folder) == []
    words = ["search", folder / "experiment.yaml", secretive, "--run-dir", folder, "--resume"]
    assert "export HF_TOKEN=" in det_ds(*words).stderr
    assert det_ds(*words, env=GIVEN).returncode == 0, "it is the same search"
