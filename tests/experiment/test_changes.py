"""What a changed key means to a run that goes on: it takes effect, is another strategy, or must be as it was."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.package import changes


def config(slots: int = 2, entrypoint: str = "trial:One", **hyperparameters: Any) -> dict[str, Any]:
    ds = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    return {
        "name": "one",
        "entrypoint": f"python3 -m determined.launch.deepspeed python3 -m determined_ds.train {entrypoint}",
        "resources": {"slots_per_trial": slots},
        "hyperparameters": {
            "global_batch_size": 8,
            "deepspeed_config": {"type": "const", "val": ds},
            "learning_rate": 0.01,
            "fit": {"max_length": {"batches": 4}},
            **hyperparameters,
        },
        "searcher": {"name": "single", "metric": "validation_loss"},
    }


def with_json(slots: int = 2, **overwrites: Any) -> dict[str, Any]:
    """With leaves of the DeepSpeed JSON overwritten."""
    return config(slots, overwrite_deepspeed_args={"type": "const", "val": overwrites})


OF_ANOTHER_KIND = with_json(optimizer={"type": "Adagrad"})
ON_FOUR = with_json(4, zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}})
SECRET = {"environment": {"environment_variables": ["TOKEN=hunter2", "OTHER=1"]}}
SEED = {"reproducibility": {"experiment_seed": 7}}
SAME = {
    **config(learning_rate={"type": "const", "val": 0.01}),
    "entrypoint": "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:One",
    "description": None,
    "max_restarts": 0,
}
LEARNS = (
    "hyperparameters.learning_rate: 0.01 -> 0.001",
    "hyperparameters.width: not given -> 7",
    "deepspeed.optimizer.params.lr: 0.01 -> 0.001",
)
VARIABLES = "environment.environment_variables: not given -> ['OTHER', 'TOKEN']"
STAGE, WEIGHTS = "deepspeed.zero_optimization.stage", {"warm_start": "weights"}
SCHEDULE = ("hyperparameters.pipe_chunks: 1 -> 2", 'hyperparameters.pipe_schedule: "1f1b" -> "interleaved"')
PIPED = ("entrypoint: ['trial:One'] -> ['trial:Two']", "hyperparameters.pipe_parallel_size: 1 -> 2")
WIDER = ("resources.slots_per_trial: 2 -> 4", "deepspeed.zero_optimization.stage: 1 -> 3", ...)
COURSE = ("reproducibility.experiment_seed", "deepspeed.train_batch_size")
SOME = (...,)  # further ones


def case(now: dict[str, Any], how: dict[str, Any] | None = None, **expected: Any) -> tuple[Any, ...]:
    """What is changed, how it goes on, and what is said of it: lines, or the keys of problems and their reason."""
    return now, how or {}, expected


CASES = {
    "nothing, however it is written": case(SAME),
    "what takes effect": case(config(learning_rate=0.001, width=7), effective=LEARNS),
    "variables, whose values are never told": case({**config(), **SECRET}, effective=(VARIABLES,)),
    "another module": case(config(entrypoint="other:One"), problems=("entrypoint",)),
    "the optimizer": case(OF_ANOTHER_KIND, problems=("deepspeed.optimizer.type",), strategy=SOME),
    "the strategy": case(ON_FOUR, strategy=WIDER, effective=SOME),
    "another schedule": case(config(pipe_schedule="interleaved"), strategy=SCHEDULE),
    "another trial of the module": case(
        config(entrypoint="trial:Two", pipe_parallel_size=2), strategy=PIPED, effective=SOME
    ),
    "the course": case({**config(global_batch_size=16), **SEED}, problems=COURSE, effective=SOME),
    "the strategy, which the checkpoint cannot change": case(
        ON_FOUR, {"refusal": "it has no index"}, problems=(STAGE, *SOME), effective=SOME
    ),
    "all but the weights": case(
        with_json(4, zero_optimization={"stage": 2}, optimizer={"type": "Adagrad"}), WEIGHTS, effective=SOME
    ),
}


@pytest.mark.parametrize(("now", "how", "expected"), CASES.values(), ids=CASES)
def test_what_a_change_means(now: dict[str, Any], how: dict[str, Any], expected: dict[str, Any]) -> None:
    """What must stay is refused with what it was, and all at once."""
    found = changes(config(), now, **how)
    for problem in found["problems"]:
        assert re.search(r"was .+ when checkpoint c was written, and must stay so", problem.message)
        assert problem.message.endswith(how.get("refusal", ""))
        assert "go back to " in problem.fix
    found["problems"] = [problem.key for problem in found["problems"]]
    for name, lines in found.items():
        wanted = [*expected.get(name, ())]
        if ... in wanted:
            assert lines
            assert {*wanted} - {...} <= {*lines}
        else:
            assert lines == wanted
