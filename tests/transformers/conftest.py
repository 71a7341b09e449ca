from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import determined as det
import pytest


@pytest.fixture
def trial(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """``trial(hparams, metric=...)``: from now on this process is the one rank of a trial with a searcher like that."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")

    def of(
        hparams: dict[str, Any] | None = None, *, slots: int = 1, latest: str | None = None, **searcher: Any
    ) -> None:
        config = {"searcher": {"name": "single", **searcher}, "resources": {"slots_per_trial": slots}}
        found = SimpleNamespace(
            hparams=hparams or {}, _config=config, trial_seed=11, _steps_completed=0, trial_id=5
        )
        info = SimpleNamespace(task_type="TRIAL", latest_checkpoint=latest, trial=found)
        monkeypatch.setattr(det, "get_cluster_info", lambda: info)

    return of
