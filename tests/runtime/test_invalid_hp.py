"""On a cluster, a point of a search that cannot run is dropped by the searcher; it is not restarted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.ranks import Ranks


def open_on_cluster(
    run_dir: str, searcher: str, hparams: dict[str, Any], slots: int = 1
) -> tuple[str, list[str]]:
    """In a rank: open a context as a trial of a cluster; how it ends, and the early exits that are reported.

    The cluster's account of the trial and its core context stand in for those that only a cluster has.
    """
    from unittest import mock

    import determined as det

    from determined_ds.errors import ConfigError
    from determined_ds.runtime import opening
    from determined_ds.runtime.local_core import local_core_context

    config = {"searcher": {"name": searcher}, "resources": {"slots_per_trial": slots}}
    trial = SimpleNamespace(hparams=hparams, _config=config, trial_seed=3, _steps_completed=0)
    info = SimpleNamespace(task_type="TRIAL", trial=trial, latest_checkpoint=None)
    reported: list[str] = []

    def init(*, distributed: Any, **_: Any) -> Any:
        made = local_core_context(Path(run_dir), distributed)
        made.train.report_early_exit = lambda reason: reported.append(reason.name)
        return made

    with (
        mock.patch.object(det, "get_cluster_info", return_value=info),
        mock.patch.object(opening.core, "init", init),
    ):
        try:
            with opening.open_context(accelerator="cpu") as opened:
                ended = f"opened with seed {opened.get_trial_seed()}"
        except SystemExit as exit_:
            ended = f"exit {exit_.code}"
        except ConfigError as error:
            ended = str(error)
    return ended, reported


GOOD: dict[str, Any] = {"global_batch_size": 8, "deepspeed_config": {"zero_optimization": {"stage": 1}}}
IMPOSSIBLE: dict[str, Any] = {
    **GOOD,
    "deepspeed_config": {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
}


@pytest.mark.parametrize("searcher", ["single", "adaptive_asha"])
def test_a_point_that_can_run_is_opened(one_rank: Ranks, tmp_path: Path, searcher: str) -> None:
    assert one_rank.run(open_on_cluster, str(tmp_path), searcher, GOOD) == [("opened with seed 3", [])]


@pytest.mark.parametrize("searcher", ["adaptive_asha", "random", "grid"])
def test_an_impossible_point_of_a_search_is_an_invalid_hp(
    one_rank: Ranks, tmp_path: Path, searcher: str
) -> None:
    """The process ends with 0, so that it counts as no failure."""
    assert one_rank.run(open_on_cluster, str(tmp_path), searcher, IMPOSSIBLE) == [("exit 0", ["INVALID_HP"])]


def test_of_several_ranks_only_the_chief_says_so(two_ranks: Ranks, tmp_path: Path) -> None:
    ends = two_ranks.run(open_on_cluster, str(tmp_path), "grid", IMPOSSIBLE, 2)
    assert ends == [("exit 0", ["INVALID_HP"]), ("exit 0", [])]


def test_without_a_search_it_is_an_error_that_says_why(one_rank: Ranks, tmp_path: Path) -> None:
    [(ended, reported)] = one_rank.run(open_on_cluster, str(tmp_path), "single", IMPOSSIBLE)
    assert "offload_param" in ended
    assert reported == []


def test_fewer_ranks_than_slots_are_noticed(one_rank: Ranks, tmp_path: Path) -> None:
    """As the deepspeed launcher starts them on CPU slots that nobody has counted for it."""
    [(ended, _)] = one_rank.run(open_on_cluster, str(tmp_path), "single", GOOD, slots=2)
    assert "slots_per_trial = 2: 1 rank was started" in ended
    assert "LOCAL_SIZE" in ended
