"""The context says how a trial is shared out, takes what one by hand gives it, and drops a point that cannot run."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from tests.harness.ranks import Ranks
from tests.package import moved

HPARAMS: dict[str, Any] = {
    "global_batch_size": 16,
    "model_width": 3,
    "deepspeed_config": {
        "gradient_accumulation_steps": 2,
        "train_micro_batch_size_per_gpu": "auto",
        "zero_optimization": {"stage": 1, "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    },
    "overwrite_deepspeed_args": {"zero_optimization": {"overlap_comm": True}},
}
PIPELINE = {
    **HPARAMS,
    "pipe_parallel_size": 2,
    "overwrite_deepspeed_args": {"zero_optimization": {"stage": 0}},
}


class Pair(NamedTuple):
    inputs: Any
    targets: Any


def opened(hparams: dict[str, Any], run_dir: Path, experiment_seed: int = 3) -> dict[str, Any]:
    """In a rank: what a context says, and what its generators draw."""
    import random

    import numpy as np
    import torch

    from determined_ds import open_context

    conf = {"reproducibility": {"experiment_seed": experiment_seed}}
    with open_context(hparams=hparams, run_dir=run_dir, exp_conf=conf, accelerator="cpu") as context:
        return {
            "batch sizes": (context.get_global_batch_size(), context.get_per_slot_batch_size()),
            "hparams": context.get_hparams(),
            "seed": context.get_trial_seed(),
            "drawn": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        }


def test_a_replica_has_its_share_of_the_global_batch_and_hyperparameters_are_completed(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    """The stages of a pipeline share one replica; Determined's own context divides by the slots."""
    for found in two_ranks.run(opened, HPARAMS, tmp_path):
        hparams = found["hparams"]
        path = Path(hparams.pop("deepspeed_config"))
        expected = {
            "train_micro_batch_size_per_gpu": 4,
            "gradient_accumulation_steps": 2,
            "data_parallel_world_size": 2,
            **dict.fromkeys(("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size"), 1),
        }
        given = {key: value for key, value in HPARAMS.items() if key != "deepspeed_config"}
        assert (found["batch sizes"], hparams) == ((16, 8), {**given, **expected})
        assert path == tmp_path / "deepspeed_config.json"
        written = json.loads(path.read_text())
        assert (written["train_micro_batch_size_per_gpu"], written["train_batch_size"]) == (4, 16)
        assert written["zero_optimization"]["overlap_comm"] is True
    assert [each["batch sizes"] for each in two_ranks.run(opened, PIPELINE, tmp_path)] == [(16, 16)] * 2


def test_every_generator_starts_from_the_seed_of_a_masters_first_trial(
    one_rank: Ranks, two_ranks: Ranks, tmp_path: Path
) -> None:
    first, second = two_ranks.run(opened, HPARAMS, tmp_path)
    assert first["drawn"] == second["drawn"]
    assert first["seed"] == second["seed"] == 1249426360  # as a master of 0.38.1 draws it of 3
    [again], [other] = (one_rank.run(opened, HPARAMS, tmp_path, seed) for seed in (3, 4))
    assert again["drawn"] == first["drawn"]
    assert all(one != another for one, another in zip(first["drawn"], other["drawn"], strict=True))


def used(run_dir: Path) -> dict[str, Any]:
    """In a rank: what a trial by hand asks of its context."""
    import numpy as np
    import torch
    from determined import pytorch

    from determined_ds import open_context

    batch = {"x": [(torch.ones(2), {"deep": np.ones(1)})], "pair": Pair(torch.ones(1), 2.5), "names": ["a"]}
    with open_context(hparams=HPARAMS, run_dir=run_dir, accelerator="cpu") as context:
        writer = context.get_tensorboard_writer()
        writer.add_scalar("mine", 1.5, 0)
        writer.close()
        ours, theirs = context.to_device(batch), pytorch.to_device(batch, context.device)
        (one,), (other,) = ours["x"], theirs["x"]
        return {
            "resolved": context.resolved.ds_config,
            "moved": torch.equal(one[0], other[0]) and torch.equal(one[1]["deep"], other[1]["deep"]),
            "kept": (ours["names"] == theirs["names"], type(ours["pair"]).__name__),
        }


def test_a_batch_is_moved_as_determined_does(one_rank: Ranks, tmp_path: Path) -> None:
    """A named tuple stays one; the author's writer writes to the run directory; DeepSpeed is given what is resolved."""
    (found,) = one_rank.run(used, tmp_path)
    assert found["resolved"]["zero_optimization"]["overlap_comm"] is True
    assert (found["moved"], found["kept"]) == (True, (True, "Pair"))
    (events,) = (tmp_path / "tensorboard").rglob("*tfevents*")
    assert b"mine" in events.read_bytes()


def test_a_packed_sequence_is_moved_and_its_batch_sizes_stay_on_the_host() -> None:
    """On the device that holds no values: a GPU's rule, which torch checks on each."""
    import torch

    packed = torch.nn.utils.rnn.pack_sequence([torch.ones(1), torch.ones(3)], enforce_sorted=False)
    found = moved({"words": packed}, "meta")["words"]
    assert (found.data.device.type, found.batch_sizes.device.type) == ("meta", "cpu")


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
