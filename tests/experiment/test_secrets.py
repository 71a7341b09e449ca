"""What is stored of a configuration has no secret in clear, and gives each back to whoever has its value."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.check.one_experiment import CheckOptions, check_experiment
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.secrets import (
    is_secret_variable,
    masked,
    masked_command,
    restored,
    secret_problems,
    secrets_of,
    stored_yaml,
)
from tests.command import ROOT

GITHUB = "ghp_" + "a1B2" * 9
HUGGING_FACE = "hf_" + "abcdefghijklmnopq" * 2
AWS = "AKIA" + "ABCDEFGH" * 2
PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "Ab1+" * 20
# Every place, with its secrets.
CONFIG: dict[str, Any] = {
    "name": "mine",
    "environment": {
        "environment_variables": [
            "HF_TOKEN=s3cret-1",
            "TOKENIZERS_PARALLELISM=false",
            "http_proxy=http://me:s3cret-2@proxy:8080",
            f"SOMETHING={GITHUB}",
        ],
        "registry_auth": {"username": "me", "password": "s3cret-3"},
    },
    "checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": AWS, "secret_key": "s3cret-4"},
    "integrations": {"pachyderm": {"dataset": {"repo": "r", "token": "s3cret-5"}}},
    "data": {"url": "https://me:s3cret-6@host/data", "api_key": "s3cret-7", "key": PEM},
    "hyperparameters": {
        "pad_token": "<pad>",
        "deepspeed_config": {"type": "const", "val": {"comet": {"enabled": True, "api_key": "s3cret-8"}}},
        "hub": {"hf_token": HUGGING_FACE},
    },
}
SECRETS = ["s3cret", GITHUB, HUGGING_FACE, AWS, "Ab1+"]


def test_no_secret_is_stored_in_clear() -> None:
    text = stored_yaml(CONFIG)
    assert not [secret for secret in SECRETS if secret in text]
    assert text.startswith("# Secrets are not stored: HF_TOKEN, http_proxy, SOMETHING, ")


def test_what_is_no_secret_stays_as_it_is() -> None:
    found = masked(CONFIG)
    assert found["environment"]["environment_variables"][:2] == [
        "HF_TOKEN=<secret HF_TOKEN, not stored>",
        "TOKENIZERS_PARALLELISM=false",
    ]
    assert found["environment"]["registry_auth"]["username"] == "me"
    assert found["hyperparameters"]["pad_token"] == "<pad>"
    assert found["data"]["url"].startswith("https://<secret DET_DS_DATA_URL, not stored>@host")
    plain = {"name": "a", "hyperparameters": {"vocab": 3, "top_k": "10", "tokens": ["<s>"]}}
    assert masked(plain) == plain
    assert "#" not in stored_yaml(plain)


def test_masking_again_changes_nothing() -> None:
    assert masked(masked(CONFIG)) == masked(CONFIG)
    assert secrets_of(masked(CONFIG)) == {}


def test_each_comes_back_from_the_environment() -> None:
    """But of those that only a cluster reads, which no process here needs."""
    environ = secrets_of(CONFIG)
    assert environ["HF_TOKEN"] == "s3cret-1"
    assert not {"s3cret-3", "s3cret-4", "s3cret-5"} & set(environ.values())
    stored = parse_yaml(stored_yaml(CONFIG), "experiment.yaml")
    found = restored(stored, environ).data
    for section in ("data", "hyperparameters"):
        assert found[section] == CONFIG[section]
    assert found["environment"]["environment_variables"] == CONFIG["environment"]["environment_variables"]
    assert found["checkpoint_storage"]["secret_key"].startswith("<secret")


def test_one_that_is_missing_is_named_with_its_variable() -> None:
    stored = parse_yaml(stored_yaml(CONFIG), "experiment.yaml")
    environ = secrets_of(CONFIG)
    del environ["HF_TOKEN"], environ["DET_DS_DATA_API_KEY"]
    with pytest.raises(ConfigError) as caught:
        restored(stored, environ)
    found = {problem.key: problem for problem in caught.value.problems}
    assert found.keys() == {"environment.environment_variables.0", "data.api_key"}
    assert "export HF_TOKEN=" in found["environment.environment_variables.0"].fix
    assert "export DET_DS_DATA_API_KEY=" in found["data.api_key"].fix
    assert restored(stored, {}, required=False).data == stored.data


@pytest.mark.parametrize(
    "name",
    [
        "HF_TOKEN",
        "token",
        "WANDB_API_KEY",
        "AWS_SECRET_ACCESS_KEY",
        "AWS_ACCESS_KEY_ID",
        "DB_PASSWORD",
        "MYSQL_PWD",
    ],
)
def test_names_of_secrets(name: str) -> None:
    assert is_secret_variable(name, "x1")
    assert not is_secret_variable(name, "")


@pytest.mark.parametrize(
    "name",
    [
        "TOKENIZERS_PARALLELISM",
        "MAX_TOKENS",
        "PWD",
        "KEYBOARD",
        "AUTHOR",
        "DB_PASSWORD_FILE",
        "MONKEY_BUSINESS",
    ],
)
def test_names_of_other_things(name: str) -> None:
    assert not is_secret_variable(name, "x1")


def test_variables_may_stand_by_kind_of_slot() -> None:
    config = {
        "environment": {"environment_variables": {"cpu": ["A_TOKEN=x1"], "cuda": ["A_TOKEN=x1", "B=2"]}}
    }
    assert secrets_of(config) == {"A_TOKEN": "x1"}
    stored = Document(name="", data=masked(config))
    assert "x1" not in str(stored.data)
    assert restored(stored, {"A_TOKEN": "x1"}).data == config


def test_a_command_is_shown_without_them() -> None:
    words = ["det-ds", "compare", "--set", "environment.environment_variables=[HF_TOKEN=s3cret,A=1]"]
    shown = masked_command([*words, "--set", f"data.url={GITHUB}", "--set", "data.api_key=s3cret"])
    assert not [secret for secret in SECRETS if secret in shown]
    assert "A=1" in shown
    assert masked_command(["det-ds", "run", "a b"]) == "det-ds run 'a b'"


def test_check_warns_of_each_and_shows_none() -> None:
    document = Document(name="experiment.yaml", data=CONFIG)
    problems = secret_problems(document)
    assert {problem.code for problem in problems} == {"secret"}
    assert len(problems) == 12
    assert not [secret for secret in SECRETS for problem in problems if secret in str(problem)]
    found = check_experiment(document, CheckOptions(context_dir=ROOT)).findings
    assert "HF_TOKEN looks like a secret" in " ".join(str(each.problem) for each in found)


def test_check_warns_of_a_placeholder() -> None:
    [problem] = secret_problems(Document(name="", data=masked({"data": {"password": "s3cret"}})))
    assert problem.key == "data.password"
    assert "a cluster takes it for the value" in problem.message
