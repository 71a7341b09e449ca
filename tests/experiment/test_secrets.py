"""``check`` warns of each secret in a configuration, by its key, and shows none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import Found, report_of

GITHUB = "ghp_" + "a1B2" * 9
HUGGING_FACE = "hf_" + "abcdefghijklmnopq" * 2
AWS = "AKIA" + "ABCDEFGH" * 2
PEM = "-----BEGIN RSA PRIVATE KEY-----\n" + "Ab1+" * 20
# Where a secret may stand: the sections, and the key that is named.
PLACES: dict[str, tuple[dict[str, Any], str]] = {
    "a variable by its name": ({"environment": {"environment_variables": ["HF_TOKEN=s3cret"]}}, "0"),
    "one for a kind of slot": ({"environment": {"environment_variables": {"cpu": ["DB_PASSWORD=s3cret"]}}}, "cpu.0"),
    "a variable by its value": ({"environment": {"environment_variables": [f"A={GITHUB}"]}}, "0"),
    "in an address": ({"environment": {"environment_variables": ["http_proxy=http://me:s3cret@a:80"]}}, "0"),
    "of a storage": (
        {"checkpoint_storage": {"type": "s3", "bucket": "b", "access_key": AWS, "secret_key": None}},
        "access_key",
    ),
    "in an address of data": ({"data": {"url": "https://me:s3cret@host/data"}}, "data.url"),
    "a private key": ({"data": {"key": PEM}}, "data.key"),
    "a hyperparameter": ({"hyperparameters": {"hub": {"hf_token": HUGGING_FACE}}}, "hub.hf_token"),
    "in DeepSpeed's JSON": (
        {"hyperparameters": {"deepspeed_config": {"type": "const", "val": {
            "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
            "comet": {"enabled": True, "api_key": "s3cret"},
        }}}},
        "comet.api_key",
    ),
}  # fmt: skip


def warned(folder: Path, sections: dict[str, Any]) -> list[Found]:
    every: list[Found] = report_of(folder, **sections)["findings"]
    return [each for each in every if each.code.startswith("secret")]


@pytest.mark.parametrize(("sections", "key"), PLACES.values(), ids=PLACES.keys())
def test_a_secret_is_named_and_not_shown(tmp_path: Path, sections: dict[str, Any], key: str) -> None:
    (only,) = warned(tmp_path, sections)
    assert only.key.endswith(key)
    for secret in ("s3cret", GITHUB, HUGGING_FACE, AWS, "Ab1+"):
        assert secret not in str(only)


def test_only_variables_of_such_a_name_are_secrets(tmp_path: Path) -> None:
    def found(names: str, value: str) -> int:
        variables = [f"{name}={value}" for name in names.split()]
        return len(warned(tmp_path, {"environment": {"environment_variables": variables}}))

    secret = "token WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID MYSQL_PWD SMTP_PASS"
    assert (found(secret, "x1"), found(secret, "")) == (6, 0)
    others = "TOKENIZERS_PARALLELISM MAX_TOKENS PWD KEYBOARD AUTHOR DB_PASSWORD_FILE MONKEY_BUSINESS"
    assert found(others, "x1") == 0


def test_other_names_are_none(tmp_path: Path) -> None:
    logging = {"wandb": {"group": "0123456789" * 4}}  # as long as an old key, and as a commit
    hyperparameters = {"pad_token": "<pad>", "top_k": "10", "tokens": ["<s>"], "logging": logging}
    assert warned(tmp_path, {"hyperparameters": hyperparameters}) == []


def test_a_placeholder_of_a_stored_configuration_is_warned_of(tmp_path: Path) -> None:
    (only,) = warned(tmp_path, {"data": {"password": "<secret DET_DS_DATA_PASSWORD, not stored>"}})
    assert (only.code, only.key) == ("secret-missing", "data.password")
    assert "a cluster takes it for the value" in only.message
