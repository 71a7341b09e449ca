"""Objects that other trainers take as arguments, and how each of them is given here.

A training runs in processes of its own and resumes on other machines, so what it is made of is code and an
experiment's YAML, and no object of the process that starts it.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any, ParamSpec, TypeVar

from determined_ds.errors import NOT_GIVEN, ConfigError, Problem

P = ParamSpec("P")
R = TypeVar("R")
BY_NEW = "det-ds new NAME writes a trial with all of its methods"
OVERRIDE = 'overrides=["hyperparameters.{}"]'

# Names of other trainers' arguments -> how it is given here.
WAYS = {
    "model net module model_engine engine model_class": f"return it from the trial's build_model(); {BY_NEW}",
    "train_loader train_dataloader trainloader dataloader train_dataset train_data dataset": (
        f"return it from the trial's build_training_data_loader(); {BY_NEW}"
    ),
    "val_loader val_dataloader valloader test_loader testloader eval_loader eval_dataset val_dataset test_dataset": (
        f"return it from the trial's build_validation_data_loader(); {BY_NEW}"
    ),
    "optimizer optim": (
        "state it in the section optimizer of the DeepSpeed JSON, or return it from the trial's build_optimizer()"
    ),
    "scheduler lr_scheduler": (
        "state it in the section scheduler of the DeepSpeed JSON, or return it from the trial's build_scheduler()"
    ),
    "criterion loss_fn loss_function": "compute it in the trial's method loss(model, batch)",
    "metrics compute_metrics": "return them from the trial's methods loss() and evaluate()",
    "num_epochs epochs n_epochs max_epochs": OVERRIDE.format("fit.max_length={epochs: N}"),
    "max_steps num_steps steps": OVERRIDE.format("fit.max_length={batches: N}"),
    "batch_size global_batch_size train_batch_size": OVERRIDE.format("global_batch_size=N"),
    "learning_rate lr": OVERRIDE.format("overwrite_deepspeed_args.optimizer.params.lr=X"),
    "ds_config deepspeed_config config_params": OVERRIDE.format("deepspeed_config=PATH"),
    "device": 'accelerator="cpu" or "cuda"',
    "strategy zero_stage stage": 'method="zero2", or any other strategy of det-ds compare',
    "num_gpus gpus world_size num_processes": "slots=N",
    "output_dir save_dir log_dir checkpoint_dir": "run_dir=PATH",
    "seed": 'overrides=["reproducibility.experiment_seed=N"]',
}
WAY_OF = {name: way for names, way in WAYS.items() for name in names.split()}
CONFIG = (
    "name the experiment's YAML, e.g. experiments/gpt2/const.yaml; det-ds new NAME writes one with its trial"
)


def experiments_only(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function that takes an experiment: objects that other trainers take are refused, with the way here.

    The call raises ConfigError, with a problem for each of them. Any other unknown name raises TypeError, as ever.
    """
    known = inspect.signature(function)

    @functools.wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        problems = list(_problems(list(known.parameters), args, kwargs))
        if problems:
            raise ConfigError(problems)
        return function(*args, **kwargs)

    return checked


def _problems(names: list[str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Problem]:
    for index, value in enumerate(args):
        if index == 0 and not isinstance(value, str | os.PathLike):
            yield _refused("argument 1", value, CONFIG)
        elif index > 0 and (index > 1 or not isinstance(value, str | os.PathLike)):
            fix = f"give only the YAML and its context directory by position; {BY_NEW}"
            yield _refused(f"argument {index + 1}", value, fix)
    for name, value in kwargs.items():
        if name in names:
            continue
        for meant in get_close_matches(name, WAY_OF, n=1, cutoff=0.85):
            yield _refused(name, value, WAY_OF[meant])


def _refused(key: str, value: Any, way: str) -> Problem:
    plain = isinstance(value, str | int | float | os.PathLike)
    return Problem(
        key=key,
        value=value if plain else NOT_GIVEN,
        message="is not taken here" if plain else f"is not taken here as an object ({type(value).__name__})",
        fix=way,
        code="object-argument",
    )
