"""What the start-up hook of a task decides: variables of the ranks, and whether to start any."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.task import BAD_BATCH, ENTRYPOINT, ON_TWO, trial
from tests.package import NO_RESTART_HELPS, start_task

TRIAL = trial()


@pytest.fixture(autouse=True)
def context_dir(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        (ON_TWO, "LOCAL_SIZE", "2"),
        ({"DET_SLOT_IDS": "[]"}, "LOCAL_SIZE", "1"),
        ({**ON_TWO, "LOCAL_SIZE": "4"}, "LOCAL_SIZE", None),
        (ON_TWO, "OMP_NUM_THREADS", None),  # in a notebook nothing is launched
        ({"DET_SLOT_IDS": str(list(range(64))), **TRIAL}, "OMP_NUM_THREADS", "1"),
        ({**ON_TWO, "OMP_NUM_THREADS": "7", **TRIAL}, "OMP_NUM_THREADS", None),
    ],
)
def test_a_variable_that_is_not_set_is_exported(given: dict[str, str], name: str, value: str | None) -> None:
    code, exports, said = start_task(given)
    assert (code, exports.get(name), said) == (0, value, [])


def test_every_reason_has_a_line_and_the_last_line_is_for_the_master() -> None:
    ds = {"zero_optimization": {"stage": 7}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    code, _, said = start_task({**ON_TWO, **trial({**BAD_BATCH, "deepspeed_config": ds, "fit": {}})})
    assert code == 2
    *reasons, last = said
    assert last == NO_RESTART_HELPS
    for reason in reasons:
        assert reason.startswith("ERROR: ")
        assert "; fix: " in reason
    for key in ("global_batch_size", "zero_optimization.stage", "lr"):
        assert any(key in reason for reason in reasons), reasons


@pytest.mark.parametrize(
    "given",
    [
        ON_TWO | TRIAL,
        # Of all machines it is known how many there are, and of this one how many slots it has.
        {"DET_SLOT_IDS": "[0]"} | TRIAL,
        ON_TWO | trial(BAD_BATCH, {"entrypoint": "python3 train.py"}),
        ON_TWO | trial(BAD_BATCH) | {"DET_TASK_TYPE": "NOTEBOOK"},
        ON_TWO | trial({"fit": {}}, {"entrypoint": f"{ENTRYPOINT} --test"}),
    ],
)
def test_what_can_run_and_what_is_not_ours_is_left_alone(given: dict[str, str]) -> None:
    code, _, said = start_task(given)
    assert (code, said) == (0, [])
