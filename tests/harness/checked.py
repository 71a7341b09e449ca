"""``det-ds check --json`` in this process: what it finds, as an editor or CI gets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from click.testing import CliRunner

from determined_ds.cli.main import main

TRIAL = """
from determined_ds import DataParallelTrial


class T(DataParallelTrial):
    sequence_parallel = True

    def evaluate(self, model, batch):
        return {"loss": 0.0, "validation_loss": 0.0}
"""
DEEPSPEED = {"optimizer": {"type": "AdamW", "params": {"lr": "auto"}}, "zero_optimization": {"stage": 1}}


class Found(NamedTuple):
    """A finding; ``points`` is the part of the search space that has it, None for all of it."""

    file: str
    line: int
    column: int
    severity: str
    code: str
    key: str
    message: str
    fix: str
    origin: str
    value: Any = None
    points: dict[str, Any] | None = None


def reports(*arguments: str | Path) -> list[dict[str, Any]]:
    """What is reported of each file, in the order of the files; ``findings`` are ``Found``."""
    done = CliRunner().invoke(main, ["check", "--json", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code in (0, 2), done.output
    files: list[dict[str, Any]] = json.loads(done.stdout)["files"]
    return [{**file, "findings": [Found(**finding) for finding in file["findings"]]} for file in files]


def findings(*arguments: str | Path) -> list[Found]:
    """All that is found, file by file."""
    return [finding for report in reports(*arguments) for finding in report["findings"]]


def report_of(
    folder: Path, *, options: tuple[str, ...] = (), trial: str = TRIAL, **sections: Any
) -> dict[str, Any]:
    """What is reported of an experiment of two slots that is written to ``a.yaml``, with ``trial.py`` beside it.

    ``sections`` go over those that let it check clean, hyperparameters one by one; what is None is left out.
    """
    fit = {"max_length": {"batches": 64}}
    hyperparameters = {
        "global_batch_size": 8,
        "learning_rate": 0.1,
        "deepspeed_config": {"type": "const", "val": DEEPSPEED},
        "fit": fit,
    }
    whole = {
        "entrypoint": "python3 -m determined_ds.train trial:T",
        "resources": {"slots_per_trial": 2},
        "searcher": {"name": "single", "metric": "validation_loss"},
        "max_restarts": 0,
        **sections,
        "hyperparameters": {**hyperparameters, **sections.get("hyperparameters", {})},
    }
    for part in (whole, whole["hyperparameters"]):
        for key in [key for key, value in part.items() if value is None]:
            del part[key]
    (folder / "trial.py").write_text(trial)
    (folder / "a.yaml").write_text(json.dumps(whole, indent=1))
    report, *_ = reports(folder / "a.yaml", folder, *options)  # the others are of the context directory
    return report
