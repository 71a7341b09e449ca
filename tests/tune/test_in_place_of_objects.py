"""A model, a loader, an optimizer as an argument is refused, with how each of them is given here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from determined_ds import ConfigError, run_training_experiment

UNTYPED: Any = run_training_experiment  # as a script calls it that was written for another trainer


def refused(*args: Any, **kwargs: Any) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        UNTYPED(*args, **kwargs)
    return {problem.key: problem.fix for problem in caught.value.problems}


def test_every_object_is_named_with_the_way_to_give_it() -> None:
    model = torch.nn.Linear(1, 1)
    found = refused(
        "experiments/gpt2/const.yaml",
        model=model,
        train_loader=[],
        val_loader=[],
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        criterion=torch.nn.MSELoss(),
        num_epochs=3,
    )
    assert list(found) == ["model", "train_loader", "val_loader", "optimizer", "criterion", "num_epochs"]
    assert "build_model()" in found["model"]
    assert "det-ds new NAME" in found["model"]
    assert "build_training_data_loader()" in found["train_loader"]
    assert "build_validation_data_loader()" in found["val_loader"]
    assert "build_optimizer()" in found["optimizer"]
    assert "loss(model, batch)" in found["criterion"]
    assert found["num_epochs"] == 'overrides=["hyperparameters.fit.max_length={epochs: N}"]'


def test_by_position_too() -> None:
    found = refused(torch.nn.Linear(1, 1), [], [])
    assert list(found) == ["argument 1", "argument 2", "argument 3"]
    assert "experiment's YAML" in found["argument 1"]


def test_a_name_that_is_nearly_one_of_them() -> None:
    assert list(refused("a.yaml", train_loaders=[])) == ["train_loaders"]


def test_any_other_name_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="colour"):
        UNTYPED("a.yaml", colour="red")


def test_what_it_takes_is_passed_on(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        run_training_experiment(tmp_path / "a.yaml", str(tmp_path))
