"""On a cluster, a point of a search that cannot run is dropped by the searcher; it is not restarted."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.harness.ranks import Ranks

GOOD: dict[str, Any] = {"global_batch_size": 8, "deepspeed_config": {"zero_optimization": {"stage": 1}}}
IMPOSSIBLE: dict[str, Any] = {
    **GOOD,
    "deepspeed_config": {"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}},
}


def open_on_cluster(
    folder: Path, searcher: str, hparams: dict[str, Any], slots: int = 2
) -> tuple[str, list[str]]:
    """In a rank: open a context as a trial of a cluster, whose account and core stand in; its end, early exits."""
    import determined as det

    from determined_ds import ConfigError, open_context

    config = {"searcher": {"name": searcher}, "resources": {"slots_per_trial": slots}}
    trial = SimpleNamespace(hparams=hparams, _config=config, trial_seed=3, _steps_completed=0)
    info = SimpleNamespace(task_type="TRIAL", trial=trial, latest_checkpoint=None)
    reported: list[str] = []

    def init(*, distributed: Any, **_: Any) -> Any:
        made = det.core._dummy_init(distributed=distributed, checkpoint_storage=str(folder))
        made.train.report_early_exit = lambda reason: reported.append(reason.name)
        return made

    with (
        mock.patch.object(det, "get_cluster_info", return_value=info),
        mock.patch.object(det.core, "init", init),
    ):
        try:
            with open_context(accelerator="cpu") as opened:
                return f"opened with seed {opened.get_trial_seed()}", reported
        except (SystemExit, ConfigError) as end:
            return str(end), reported


def test_an_impossible_point_of_a_search_is_an_invalid_hp(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    """The process ends with 0, so that it counts as no failure; without a search it is an error."""
    ends = two_ranks.run(open_on_cluster, tmp_path, "adaptive_asha", IMPOSSIBLE)
    assert ends == [("0", ["INVALID_HP"]), ("0", [])]
    ends = two_ranks.run(open_on_cluster, tmp_path, "adaptive_asha", GOOD)
    assert ends == [("opened with seed 3", [])] * 2
    for hparams, slots, words in (
        (IMPOSSIBLE, 1, "offload_param"),
        (GOOD, 2, "slots_per_trial = 2: 1 rank was started"),
    ):
        [(said, reported)] = one_rank.run(open_on_cluster, tmp_path, "single", hparams, slots)
        assert words in said
        assert reported == []
