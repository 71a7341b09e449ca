"""What a check makes of a whole experiment: a script, another's trial, a launcher, variables, stored checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.checked import report_of

SCRIPT = "entrypoint=python3 train.py"
BATCH = "hyperparameters.global_batch_size=9"  # on two slots
THEIRS = "entrypoint=python3 -m determined.launch.deepspeed --trial trial:T"
LENGTH = ["searcher.max_length={batches: 7}", "min_validation_period={batches: 3}"]
LAUNCHER = "entrypoint=python3 -m determined.launch.deepspeed python3 -m determined_ds.train trial:T"
OTHER_LAUNCHER = LAUNCHER.replace("deepspeed", "torch_distributed", 1)
WIDE = ["resources={slots_per_trial: 16}", "hyperparameters.global_batch_size=16"]
ONE_MACHINE = [
    "resources={slots_per_trial: 16, is_single_node: true}",
    "hyperparameters.global_batch_size=16",
]
LIMIT = "hyperparameters.fit={max_length: {batches: 64}, save_total_limit: %d}"
KEEP = "checkpoint_storage={save_trial_%s: %d}"
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
        # Determined's launcher of DeepSpeed, where a trial spans machines: more than eight slots.
        ([LAUNCHER, *WIDE], ["warning launcher-machines entrypoint"]),
        ([LAUNCHER, *ONE_MACHINE], []),
        ([OTHER_LAUNCHER, *WIDE], []),
        # A limit that may delete what is to be kept: while training, only the best and the newest surely stay.
        ([KEEP % ("best", 2), LIMIT % 5], ["warning save-limit checkpoint_storage.save_trial_best"]),
        ([KEEP % ("latest", 3), LIMIT % 2], ["warning save-limit checkpoint_storage.save_trial_latest"]),
        ([KEEP % ("latest", 3), LIMIT % 3], []),
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
