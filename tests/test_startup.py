"""What the start-up hook of a task decides: variables of the ranks, and whether to start any."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import startup
from determined_ds.cluster_log import NO_RESTART_HELPS
from determined_ds.devices import num_cores

CONFIG = {
    "entrypoint": "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:Trial",
    "resources": {"slots_per_trial": 2},
    "searcher": {"name": "single", "metric": "validation_loss"},
}
HPARAMS = {
    "global_batch_size": 8,
    "deepspeed_config": {"zero_optimization": {"stage": 1}},
    "fit": {"max_length": {"batches": 4}},
}
TORCH_LEVEL = "TORCH_CPP_LOG_LEVEL"
BAD_BATCH = {"global_batch_size": 9}
ON_TWO = {"DET_SLOT_IDS": "[0, 1]"}


def trial(hparams: dict[str, Any] | None = None, config: dict[str, Any] | None = None) -> dict[str, str]:
    """What a cluster puts into the environment of a trial's container, but for its slots."""
    return {
        "DET_TASK_TYPE": "TRIAL",
        "DET_TRIAL_ID": "7",
        "DET_TRIAL_SEED": "3",
        "DET_STEPS_COMPLETED": "0",
        "DET_HPARAMS": json.dumps({**HPARAMS, **(hparams or {})}),
        "DET_EXPERIMENT_CONFIG": json.dumps({**CONFIG, **(config or {})}),
    }


TRIAL = trial()
Start = Callable[[dict[str, str]], tuple[int, dict[str, str], list[str]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Start:
    """``start(environment)``: the exit code, what is exported, and the lines that are said."""
    monkeypatch.chdir(tmp_path)

    def started(environment: dict[str, str]) -> tuple[int, dict[str, str], list[str]]:
        monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], **environment})
        code = startup.main()
        out, err = capsys.readouterr()
        exports = (line.removeprefix("export ").split("=", 1) for line in out.splitlines() if line)
        return code, dict(exports), err.splitlines()

    return started


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({}, "LOCAL_SIZE", None),
        (ON_TWO, "LOCAL_SIZE", "2"),
        ({"DET_SLOT_IDS": "[]"}, "LOCAL_SIZE", "1"),
        ({"DET_SLOT_IDS": "null"}, "LOCAL_SIZE", "1"),
        ({**ON_TWO, "LOCAL_SIZE": "4"}, "LOCAL_SIZE", None),
        # Ranks of a machine divide its cores, as under det-ds run; in a notebook nothing is launched.
        (ON_TWO, "OMP_NUM_THREADS", None),
        ({"DET_SLOT_IDS": "[0]", **TRIAL}, "OMP_NUM_THREADS", str(num_cores())),
        ({**ON_TWO, **TRIAL}, "OMP_NUM_THREADS", str(max(1, num_cores() // 2))),
        ({"DET_SLOT_IDS": str(list(range(64))), **TRIAL}, "OMP_NUM_THREADS", "1"),
        ({**ON_TWO, "OMP_NUM_THREADS": "7", **TRIAL}, "OMP_NUM_THREADS", None),
        # Torch's warning of a host without a name, of each process.
        ({**ON_TWO, **TRIAL}, TORCH_LEVEL, "ERROR"),
        ({**ON_TWO, **TRIAL, TORCH_LEVEL: "INFO"}, TORCH_LEVEL, None),
        ({**ON_TWO, **trial({}, {"debug": True})}, TORCH_LEVEL, None),
    ],
)
def test_a_variable_that_is_not_set_is_exported(
    start: Start, given: dict[str, str], name: str, value: str | None
) -> None:
    code, exports, said = start(given)
    assert (code, exports.get(name), said) == (0, value, [])


@pytest.mark.parametrize("own", ["", "/opt/modules"])
def test_python_looks_into_the_context_directory_first(start: Start, tmp_path: Path, own: str) -> None:
    _, exports, _ = start({**ON_TWO, **TRIAL, "PYTHONPATH": own})
    assert exports["PYTHONPATH"].split(os.pathsep) == [str(tmp_path), *filter(None, [own])]
    _, exports, _ = start({**ON_TWO, "DET_TASK_TYPE": "NOTEBOOK", "PYTHONPATH": own})
    assert "PYTHONPATH" not in exports


def test_every_reason_has_a_line(start: Start) -> None:
    ds = {"zero_optimization": {"stage": 7}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    code, _, said = start({**ON_TWO, **trial({**BAD_BATCH, "deepspeed_config": ds, "fit": {}})})
    assert code == 2
    *reasons, last = said
    assert last == NO_RESTART_HELPS
    assert all(reason.startswith("ERROR: ") for reason in reasons)
    for key in ("global_batch_size", "zero_optimization.stage", "lr"):
        assert any(key in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    ("hparams", "config", "says"),
    [
        ({"fit": {}}, {}, "fit.max_length (hyperparameters): missing"),
        ({"deepspeed_config": "no/such.json"}, {}, "deepspeed_config = 'no/such.json'"),
        ({}, {"resources": {"slots_per_trial": 0}}, "resources.slots_per_trial = 0: "),
        ({}, {"environment": {"environment_variables": ["A=<secret A, not stored>"]}}, "A"),
    ],
)
def test_what_the_ranks_would_refuse_is_refused(
    start: Start, hparams: dict[str, Any], config: dict[str, Any], says: str
) -> None:
    code, _, said = start({**ON_TWO, **trial(hparams, config)})
    assert code == 2
    assert says in said[0]


@pytest.mark.parametrize(
    "given",
    [
        ON_TWO | TRIAL,
        # Of all machines it is known how many there are, and of this one how many slots it has.
        {"DET_SLOT_IDS": "[0]"} | TRIAL,
        ON_TWO | trial(BAD_BATCH, {"entrypoint": "python3 train.py"}),
        ON_TWO | trial(BAD_BATCH) | {"DET_TASK_TYPE": "NOTEBOOK"},
        ON_TWO | trial({"fit": {}}, {"entrypoint": f"{CONFIG['entrypoint']} --test"}),
    ],
)
def test_what_can_run_and_what_is_not_ours_is_left_alone(start: Start, given: dict[str, str]) -> None:
    code, _, said = start(given)
    assert (code, said) == (0, [])


@pytest.mark.parametrize(("slots", "is_said"), [("[0]", True), ("[0, 1]", False)])
def test_determineds_launcher_of_deepspeed_is_warned_of_on_two_machines(
    start: Start, slots: str, is_said: bool
) -> None:
    entrypoint = str(CONFIG["entrypoint"]).replace("torch_distributed", "deepspeed")
    code, _, said = start({"DET_SLOT_IDS": slots, **trial({}, {"entrypoint": entrypoint})})
    assert code == 0
    warning = (
        "WARNING: entrypoint: on several machines determined.launch.deepspeed changes environment variables"
    )
    assert any(line.startswith(warning) for line in said) == is_said
