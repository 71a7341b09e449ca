"""Which ranks of a pipeline share a machine: docs/machines.md follows from it. Ranks are counted machine by machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoints.strategies import ZERO, hyperparameters, trial_class
from tests.harness.ranks import Ranks


def place(run_dir: Path, within: bool) -> dict[str, Any]:
    """In a rank: its stage and replica in the engine, and who is with it there."""
    from determined_ds import open_context

    strategy = ZERO["pipe2_zero1"]
    hparams = hyperparameters(strategy, pipe_within_machine=within)
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        grid = trial_class(strategy)(context).engine.grid
        return {
            "stage": grid.get_stage_id(),
            "replica": grid.get_data_parallel_rank(),
            "replicas": list(grid.dp_group),
            "pipeline": list(grid.pp_group),
        }


@pytest.mark.parametrize("within", [False, True])
def test_ranks_stand_where_det_ds_says(four_ranks: Ranks, tmp_path: Path, within: bool) -> None:
    """On two machines of two: stages apart and replicas together, or ``pipe_within_machine``."""
    for rank, found in enumerate(four_ranks.run(place, tmp_path, within)):
        first, second = [rank // 2 * 2, rank // 2 * 2 + 1], [rank % 2, rank % 2 + 2]  # of a machine; across
        assert found == {
            "stage": rank % 2 if within else rank // 2,
            "replica": rank // 2 if within else rank % 2,
            "replicas": second if within else first,
            "pipeline": first if within else second,
        }
