"""Checkpoints by the clock: which batches are trained, and to what, does not depend on when they are written.

When one is due is in ``test_stopping.py``.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from determined.pytorch import Batch

from determined_ds.errors import ConfigError
from determined_ds.protocol.checkpoint_files import checkpoints_in
from determined_ds.runtime.loop.fit import Trainer
from tests.runtime.test_resume import NUM_BATCHES, STRATEGIES, experiment, run
from tests.runtime.victim import differences, last_words

AT_ONCE = {"seconds": 0.0001}  # after every batch
SCRIPT = "python3 -m determined.launch.torch_distributed python3 tests/session/victim_script.py range"
KINDS: dict[str, tuple[dict[str, Any], str]] = {
    "trial": (STRATEGIES["zero1"], "before:8"),
    "pipeline": (STRATEGIES["pipeline"], "before:8"),
    "session": (STRATEGIES["zero1"], "micro:8"),
}
OTHERS = pytest.mark.long("the same loop for a pipeline, and for a session")


@pytest.mark.parametrize(
    "kind", [kind if kind == "trial" else pytest.param(kind, marks=OTHERS) for kind in KINDS]
)
def test_killed_and_resumed_it_ends_as_one_that_counts_batches(kind: str, tmp_path: Path) -> None:
    strategy, kill_at = KINDS[kind]
    config = experiment(**strategy)
    fit = config["hyperparameters"]["fit"]
    if kind == "session":
        config["entrypoint"] = SCRIPT
        del fit["validation_period"]
    configs = {name: tmp_path / f"{name}.yaml" for name in ("counted", "clock")}
    configs["counted"].write_text(yaml.safe_dump(config))
    fit["checkpoint_period"] = AT_ONCE
    configs["clock"].write_text(yaml.safe_dump(config))
    counted = run(configs["counted"], tmp_path / "counted")
    assert counted.returncode == 0, counted.stderr
    killed = run(configs["clock"], tmp_path / "clock", KILL_AT=kill_at)
    assert killed.returncode == 1, killed.stderr
    resumed = run(configs["clock"], tmp_path / "clock", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    steps = sorted(each.steps_completed for each in checkpoints_in(tmp_path / "clock" / "checkpoints"))
    assert steps == list(range(1, NUM_BATCHES + 1 if kind != "session" else len(steps) + 1))
    assert len(steps) > len(checkpoints_in(tmp_path / "counted" / "checkpoints"))
    assert differences(last_words(tmp_path / "counted"), last_words(tmp_path / "clock")) == []


@pytest.mark.parametrize(
    ("fit", "key", "said"),
    [
        ({"checkpoint_period": timedelta()}, "fit.checkpoint_period", "must be more than 0"),
        (
            {"validation_period": timedelta(minutes=1)},
            "fit.validation_period",
            "cannot be a time: what is best",
        ),
        ({"reporting_period": timedelta(minutes=1)}, "fit.reporting_period", "cannot be a time: the metrics"),
    ],
)
def test_fit_refuses_other_times_by_name(fit: dict[str, Any], key: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        Trainer(None, None).fit(max_length=Batch(3), **fit)
    assert [problem.key for problem in refused.value.problems] == [key]
