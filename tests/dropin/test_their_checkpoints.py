"""What Determined's own Trainer wrote off-cluster loads here."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import Ranks, free_port


def train_by_determined(
    home: Path, kind: str, plainly: bool, ports: dict[str, int]
) -> tuple[str, list[float]]:
    """In a rank: train under Determined's context and Trainer. The uuid, and the weights.

    ``plainly``: the engine's configuration is a dict, and not the AttrDict that many such trials have.
    """
    from determined.pytorch import Batch
    from determined.pytorch.deepspeed import Trainer

    from determined_ds import open_context
    from tests.dropin import trials
    from tests.harness.determineds_own import determined_context

    os.environ["XDG_DATA_HOME"] = str(home)
    if plainly:
        trials.AttrDict = dict
    with open_context(accelerator="cpu") as around:
        storage = str(home / "determined")
        context = determined_context(around, {"global_batch_size": 16}, storage, **ports)
        trial = getattr(trials, kind)(context)
        Trainer(trial, context).fit(max_length=Batch(2), validation_period=Batch(2))
    return trial.kept.handed["checkpoint_upload_end"][-1], weights(trial)


def weights(trial: Any) -> list[float]:
    return [float(number) for each in trial.engine.module.parameters() for number in each.detach().flatten()]


def resume_here(home: Path, kind: str, uuid: str) -> tuple[list[float], int, str]:
    """In a rank: the weights that training begins with here, and the batches of it; or why not."""
    from determined.pytorch import Batch

    from determined_ds import DeterminedDSError, Trainer, init
    from tests.dropin import trials

    os.environ["XDG_DATA_HOME"] = str(home)
    with init() as context:
        trial = getattr(trials, kind)(context)
        loaded: list[float] = []
        train_batch = trial.train_batch

        def first_weights(*args: Any) -> Any:
            loaded.extend([] if loaded else weights(trial))
            return train_batch(*args)

        trial.train_batch = first_weights
        path = str(home / "determined" / uuid)
        try:
            Trainer(trial, context).fit(
                max_length=Batch(4), reporting_period=Batch(1), latest_checkpoint=path
            )
        except DeterminedDSError as error:
            return [], 0, str(error)
    return loaded, len(trial.kept.handed["training_workload_end"]), ""


@pytest.mark.parametrize("kind", ["Replicated", "Piped"])
def test_training_continues_unless_the_configuration_is_no_plain_data(
    one_rank: Ranks, kind: str, tmp_path: Path
) -> None:
    ports = {"pub_port": free_port(), "pull_port": free_port()}
    ((uuid, trained),) = one_rank.run(train_by_determined, tmp_path, kind, True, ports)
    assert (tmp_path / "determined" / uuid / "trial_state.pkl").is_file()
    assert one_rank.run(resume_here, tmp_path, kind, uuid) == [(trained, 2, "")]  # two of four were trained
    if kind == "Replicated":
        ((uuid, _),) = one_rank.run(train_by_determined, tmp_path, kind, False, ports)
        ((_, _, why),) = one_rank.run(resume_here, tmp_path, kind, uuid)
        assert "holds objects of attrdict.dictionary.AttrDict that could run code" in why
