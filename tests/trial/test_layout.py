"""Which ranks of a pipeline share a machine: docs/machines.md follows from it. Ranks are counted machine by machine."""

from __future__ import annotations

from pathlib import Path

from tests.checkpoints.strategies import ZERO, hyperparameters, trial_class
from tests.harness.ranks import Ranks


def place(run_dir: Path, within: bool) -> tuple[list[int], list[int]]:
    """In a rank: the ranks of its stage in all replicas, and those of its pipeline in the order of stages."""
    from determined_ds import open_context

    strategy = ZERO["pipe2_zero1"]
    hparams = hyperparameters(strategy, pipe_within_machine=within)
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        grid = trial_class(strategy)(context).engine.grid
        return list(grid.dp_group), list(grid.pp_group)


def test_ranks_stand_where_det_ds_says(four_ranks: Ranks, tmp_path: Path) -> None:
    """On two machines of two: stages apart and replicas together, or ``pipe_within_machine``."""
    machines, across = [[0, 1], [0, 1], [2, 3], [2, 3]], [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert four_ranks.run(place, tmp_path, False) == list(zip(machines, across, strict=True))
    assert four_ranks.run(place, tmp_path, True) == list(zip(across, machines, strict=True))
