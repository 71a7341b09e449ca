"""``hyperparameters.logging``: options by the clients' own names, none misspelt, no secret, no absent package."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config import loggers
from determined_ds.config.hyperparameters import parse_hyperparameters
from determined_ds.config.loggers import MODES, TOOLS, lost_on_cluster, missing_keys, missing_loggers
from determined_ds.documents.document import Document
from determined_ds.experiment.secrets import secret_problems
from tests.making import decide, hyperparameters, refusal


def read(logging: Any) -> dict[str, dict[str, Any]]:
    return parse_hyperparameters(hyperparameters({"logging": logging})).logging


def test_a_line_for_each_tool_and_several_at_once() -> None:
    stated = {"wandb": {"project": "x", "tags": ["a"]}, "csv": {}, "mlflow": True, "comet": False}
    assert read(stated) == {"wandb": {"project": "x", "tags": ["a"]}, "csv": {}, "mlflow": {}}
    assert read({"mlflow": {"tracking_uri": "http://127.0.0.1:5000", "tags": {"team": "a", "budget": 3}}})
    assert parse_hyperparameters(hyperparameters({})).logging == {}


@pytest.mark.parametrize(
    ("logging", "key", "fix"),
    [
        ({"wnadb": {}}, "wnadb", "did you mean 'wandb'?"),
        ({"weights_and_biases": {}}, "weights_and_biases", "did you mean wandb?"),
        ({"wandb": {"projct": "x"}}, "wandb.projct", "did you mean 'project'?"),
        ({"wandb": {"team": "x"}}, "wandb.team", "did you mean entity?"),
        ({"wandb": {"resume": "must"}}, "wandb.resume", "a run is continued"),
        ({"wandb": {"mode": "offlin"}}, "wandb.mode", "use one of online, offline, disabled"),
        ({"wandb": {"tags": "a"}}, "wandb.tags", "write tags: [a, b]"),
        ({"wandb": None}, "wandb", "write wandb: {}, or false"),
        ({"mlflow": {"experiment": "x"}}, "mlflow.experiment", "did you mean experiment_name?"),
        ({"mlflow": {"tags": {"a": [1]}}}, "mlflow.tags.a", "write e.g. tags: {team: vision}"),
        ({"comet": {"project": "x"}}, "comet.project", "did you mean project_name?"),
        ({"comet": {"online": "no"}}, "comet.online", "write true or false"),
        ({"csv": {"path": "x"}}, "csv.path", "write csv: {}"),
    ],
)
def test_what_no_client_takes_is_refused_with_what_it_takes(logging: Any, key: str, fix: str) -> None:
    problem = refusal(lambda: read(logging))
    assert problem.key == f"hyperparameters.logging.{key}"
    assert fix in problem.fix


def test_a_name_in_place_of_a_mapping_is_refused() -> None:
    problem = refusal(lambda: read("wandb"))
    assert (problem.key, problem.fix) == ("hyperparameters.logging", "write logging: {wandb: {}}")


def test_the_options_are_those_of_the_clients() -> None:
    comet_ml, wandb = pytest.importorskip("comet_ml"), pytest.importorskip("wandb")
    taken = inspect.signature(wandb.init).parameters
    assert set(TOOLS["wandb"].options) <= set(taken)
    assert all(mode in str(taken["mode"].annotation) for mode in MODES)
    of_comet = {
        *inspect.signature(comet_ml.start).parameters,
        *inspect.signature(comet_ml.ExperimentConfig).parameters,
    }
    assert set(TOOLS["comet"].options) <= of_comet


@pytest.mark.parametrize(
    ("tool", "option", "value", "variable"),
    [
        ("wandb", "api_key", "anything", "WANDB_API_KEY"),
        ("wandb", "notes", "0123456789abcdef0123456789abcdef01234567", "WANDB_API_KEY"),
        ("mlflow", "tracking_uri", "http://me:swordfish@mlflow.local", "MLFLOW_TRACKING_PASSWORD"),
        ("mlflow", "token", "anything", "MLFLOW_TRACKING_TOKEN"),
        ("comet", "api_key", "anything", "COMET_API_KEY"),
    ],
)
def test_a_key_is_refused_and_shown_nowhere(tool: str, option: str, value: str, variable: str) -> None:
    problem = refusal(lambda: read({tool: {option: value}}))
    assert variable in problem.fix
    assert "in the environment" in problem.fix
    assert value not in str(problem)


def test_a_key_is_an_error_and_not_also_the_warning_of_any_secret() -> None:
    config = {"hyperparameters": {"logging": {"wandb": {"api_key": "x" * 40, "notes": "AKIA" + "A" * 16}}}}
    warned = secret_problems(Document(name="experiment.yaml", data=config))
    assert [problem.key for problem in warned] == ["hyperparameters.logging.wandb.notes"]


def test_an_absent_client_is_known_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loggers, "find_spec", lambda name: None if name == "comet_ml" else object())
    (problem,) = missing_loggers(hyperparameters({"logging": {"wandb": {}, "comet": {}, "csv": {}}}))
    assert problem.key == "hyperparameters.logging.comet"
    assert "pip install 'comet-ml'" in problem.fix
    assert "startup-hook.sh" in problem.fix


@pytest.mark.parametrize(
    ("logging", "environ", "keys"),
    [
        ({"wandb": {}, "comet": {}, "mlflow": {}, "csv": {}}, {}, ["wandb", "comet"]),
        ({"wandb": {}, "comet": {}}, {"WANDB_API_KEY": "x", "COMET_API_KEY": "x"}, []),
        ({"wandb": {"mode": "offline"}, "comet": {"online": False}}, {}, []),
        ({"wandb": {}}, {"WANDB_MODE": "offline"}, []),
    ],
)
def test_a_client_that_will_find_no_key_is_warned_of(
    logging: Any, environ: dict[str, str], keys: list[str], tmp_path: Path
) -> None:
    found = missing_keys(hyperparameters({"logging": logging}), {"HOME": str(tmp_path), **environ})
    assert [problem.key for problem in found] == [f"hyperparameters.logging.{key}" for key in keys]
    (tmp_path / ".netrc").touch()
    (tmp_path / ".comet.config").touch()
    assert missing_keys(hyperparameters({"logging": logging}), {"HOME": str(tmp_path), **environ}) == []


def test_mlflow_without_a_server_is_warned_of_on_a_cluster() -> None:
    given = hyperparameters({"logging": {"mlflow": {}}})
    (problem,) = lost_on_cluster(given, "")
    assert (problem.key, problem.code) == ("hyperparameters.logging.mlflow", "logger-server")
    assert lost_on_cluster(given, "['MLFLOW_TRACKING_URI=http://mlflow:5000']") == []
    assert lost_on_cluster(hyperparameters({"logging": {"mlflow": {"tracking_uri": "http://x"}}}), "") == []
    assert lost_on_cluster(hyperparameters({"logging": {"csv": {}}}), "") == []


# ----------------------------------------------------------------------- DeepSpeed's own monitors


@pytest.mark.parametrize("section", ["wandb", "comet"])
def test_a_monitor_of_deepspeed_beside_it_is_refused_and_alone_is_hinted_at(section: str) -> None:
    ds = {"train_batch_size": 8, section: {"enabled": True}}
    problem = refusal(lambda: decide({"logging": {section: {}}}, ds))
    assert (problem.key, problem.code) == (f"{section}.enabled", "reported-twice")
    (warning,) = decide({"logging": {"csv": {}}}, ds).warnings
    assert (warning.key, warning.code) == (f"{section}.enabled", "monitor")
    assert f"write hyperparameters.logging: {{{section}: {{}}}}" in warning.fix


def test_monitors_that_write_to_the_run_directory_go_with_it() -> None:
    ds = {"train_batch_size": 8, "tensorboard": {"enabled": True}, "csv_monitor": {"enabled": True}}
    assert decide({"logging": {"csv": {}, "tensorboard": {}}}, ds).warnings == ()


def test_a_key_in_the_json_is_refused_and_not_shown() -> None:
    ds = {"train_batch_size": 8, "comet": {"enabled": False, "api_key": "swordfish"}}
    problem = refusal(lambda: decide({}, ds))
    assert problem.key == "comet.api_key"
    assert "swordfish" not in str(problem)
