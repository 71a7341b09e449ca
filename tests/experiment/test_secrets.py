"""``check`` warns of each secret in a configuration, by its key, and shows none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.checked import DEEPSPEED, report_of

HUGGING_FACE = "hf_" + "abcdefghijklmnopq" * 2
AWS = "AKIA" + "ABCDEFGH" * 2
S3 = {"type": "s3", "bucket": "b", "access_key": AWS, "secret_key": None}
COMET = {"type": "const", "val": {**DEEPSPEED, "comet": {"enabled": True, "api_key": "s3cret"}}}
SECRET = "token WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_ACCESS_KEY_ID MYSQL_PWD SMTP_PASS"
OTHERS = "TOKENIZERS_PARALLELISM MAX_TOKENS PWD KEYBOARD DB_PASSWORD_FILE"


TOOLS = {
    "wandb": {"notes": f"wandb_v1_{'s3cret' * 4}"},
    "mlflow": {"tracking_uri": "http://me:s3cret@mlflow"},
}


def variables(names: str, value: str = "x1") -> dict[str, Any]:
    return {"environment": {"environment_variables": [f"{name}={value}" for name in names.split()]}}


# What it is -> the sections in which it stands, and the ends of the keys that are named.
PLACES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "variables by their names": (variables(SECRET), ["0", "1", "2", "3", "4", "5"]),
    "in an address": (variables("http_proxy", "http://me:s3cret@a:80"), ["0"]),
    "variables of other names": (variables(OTHERS), []),
    "of a storage": ({"checkpoint_storage": S3}, ["access_key"]),
    "a hyperparameter": ({"hyperparameters": {"hub": {"hf_token": HUGGING_FACE}}}, ["hub.hf_token"]),
    "in DeepSpeed's JSON": ({"hyperparameters": {"deepspeed_config": COMET}}, ["comet.api_key"]),
    "other hyperparameters": ({"hyperparameters": {"pad_token": "<pad>", "tokens": ["<s>"]}}, []),
    "options of a tool": ({"hyperparameters": {"logging": TOOLS}}, ["wandb.notes", "mlflow.tracking_uri"]),
}


@pytest.mark.parametrize(("sections", "keys"), PLACES.values(), ids=PLACES)
def test_a_secret_is_named_and_not_shown(tmp_path: Path, sections: dict[str, Any], keys: list[str]) -> None:
    found = [each for each in report_of(tmp_path, **sections)["findings"] if each.code == "secret"]
    assert len(found) == len(keys)
    assert all(each.key.endswith(key) for each, key in zip(found, keys, strict=True))
    for secret in ("s3cret", HUGGING_FACE, AWS):
        assert secret not in str(found)
