"""What a check makes of a whole experiment: a script, another's trial, variables."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checked import report_of

SCRIPT = "entrypoint=python3 train.py"
BATCH = "hyperparameters.global_batch_size=9"  # on two slots
THEIRS = "entrypoint=python3 -m determined.launch.deepspeed --trial trial:T"
LENGTH = ["searcher.max_length={batches: 7}", "min_validation_period={batches: 3}"]
NO_FIT, LOGS = "hyperparameters.fit=null", "hyperparameters.logging={wandb: {project: x}}"
AS_WORDS = "entrypoint=[python3, train.py]"
VARIABLES = "environment.environment_variables"


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        # A script may decide what is not stated; what is stated is checked, and what its code cannot honour.
        ([AS_WORDS, BATCH, NO_FIT], ["error batch hyperparameters.global_batch_size"]),
        ([SCRIPT, "hyperparameters.deepspeed_config=null"], ["note left-open entrypoint"]),
        ([SCRIPT, LOGS], ["warning logger-script hyperparameters.logging"]),
        # A trial in Determined's own form is checked like ours, and trains as long as its searcher says.
        ([THEIRS, NO_FIT, *LENGTH], ["warning deprecated-key entrypoint"]),
        (
            [THEIRS, NO_FIT],
            ["error max-length hyperparameters.fit.max_length", "warning deprecated-key entrypoint"],
        ),
        # Another command is left to Determined.
        (["entrypoint=python3 -m determined.launch.x", BATCH], ["warning entrypoint entrypoint"]),
        (["entrypoint=python3 -m determined_ds.trian trial:T"], ["error entrypoint entrypoint"]),
        # Of a section that is none, only that is said.
        *(
            ([f"{key}=3"], [f"error wrong-type {key}"])
            for key in ("hyperparameters", "hyperparameters.fit", "searcher", "entrypoint")
        ),
        # Variables that a launch sets, and devices that are none.
        ([f"{VARIABLES}=[RANK=3, A=1]"], [f"warning environment-variables {VARIABLES}.0"]),
        ([f"{VARIABLES}={{tpu: [A=1]}}"], [f"error unknown-key {VARIABLES}.tpu"]),
        ([f"{VARIABLES}=[=1]"], [f"error environment-variables {VARIABLES}.0"]),
    ],
)
def test_this_is_found(tmp_path: Path, overrides: list[str], found: list[str]) -> None:
    (tmp_path / "train.py").write_text("import deepspeed\n")
    options = [word for override in overrides for word in ("--set", override)]
    every = report_of(tmp_path, options=tuple(options))["findings"]
    assert sorted(f"{each.severity} {each.code} {each.key}" for each in every) == found
