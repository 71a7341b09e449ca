"""What a changed key means to a run that goes on: every key is decided, and what must be as it was is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.keys.fate import Meaning
from determined_ds.config.resolve import Where
from determined_ds.documents.differences import differences
from determined_ds.documents.document import Document
from determined_ds.errors import NOT_GIVEN
from determined_ds.experiment.changed_keys import (
    Changes,
    Settings,
    changes_since,
    meaning_of,
    meaning_to_deepspeed,
    settings_before,
    settings_of,
)
from determined_ds.experiment.decide import decide
from determined_ds.experiment.experiment import (
    parse_experiment,
)
from determined_ds.experiment.space.master_random import first_trial_seed

CPU = Accelerator(name="cpu", num_devices=8, bf16=False, fp16=False)


@pytest.mark.parametrize(
    ("key", "meaning"),
    {
        "entrypoint": Meaning.COURSE,
        "resources.slots_per_trial": Meaning.STRATEGY,
        "resources.resource_pool": Meaning.NOTHING,
        "reproducibility.experiment_seed": Meaning.COURSE,
        "hyperparameters.fit.max_length.batches": Meaning.EFFECT,
        "hyperparameters.width": Meaning.EFFECT,
        "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage": Meaning.RESOLVED,
        "hyperparameters.zero_stage": Meaning.RESOLVED,
        "hyperparameters.micro_batch_size": Meaning.RESOLVED,
        "hyperparameters.generator_zero_stage": Meaning.STRATEGY,
        "hyperparameters.pipe_parallel_size": Meaning.STRATEGY,
        "hyperparameters.model_parallel_size": Meaning.STRATEGY,
        "hyperparameters.trial_seed": Meaning.COURSE,
        "hyperparameters.generator_overwrite_deepspeed_args.zero_optimization.stage": Meaning.STRATEGY,
        "hyperparameters.generator_overwrite_deepspeed_args.optimizer.params.lr": Meaning.EFFECT,
        "data.path": Meaning.EFFECT,
        "name": Meaning.NOTHING,
    }.items(),
)
def test_what_keys_of_an_experiment_mean(key: str, meaning: Meaning) -> None:
    assert meaning_of(tuple(key.split("."))) is meaning


@pytest.mark.parametrize(
    ("key", "meaning"),
    {
        "train_batch_size": Meaning.COURSE,
        "train_micro_batch_size_per_gpu": Meaning.EFFECT,
        "zero_optimization.stage": Meaning.STRATEGY,
        "zero_optimization.sub_group_size": Meaning.STRATEGY,
        "zero_optimization.reduce_bucket_size": Meaning.EFFECT,
        "optimizer.type": Meaning.OPTIMIZER,
        "optimizer.params.lr": Meaning.EFFECT,
        "optimizer.params.amsgrad": Meaning.OPTIMIZER,
        "optimizer.params.torch_adam": Meaning.STRATEGY,
        "scheduler.type": Meaning.LAYOUT,
        "scheduler.params.warmup_num_steps": Meaning.EFFECT,
        "bf16.enabled": Meaning.STRATEGY,
        "gradient_clipping": Meaning.EFFECT,
    }.items(),
)
def test_what_keys_of_deepspeed_mean(key: str, meaning: Meaning) -> None:
    assert meaning_to_deepspeed(tuple(key.split("."))) is meaning


# ------------------------------------------------------------------------------- two configurations


def config(**hyperparameters: Any) -> dict[str, Any]:
    ds = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    return {
        "name": "one",
        "entrypoint": "python3 -m determined.launch.deepspeed python3 -m determined_ds.train trial:One",
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {
            "global_batch_size": 8,
            "deepspeed_config": {"type": "const", "val": ds},
            "learning_rate": 0.01,
            "fit": {"max_length": {"batches": 4}},
            **hyperparameters,
        },
        "searcher": {"name": "single", "metric": "validation_loss"},
    }


def asked(data: dict[str, Any]) -> tuple[Any, Any]:
    experiment = parse_experiment(Document(name="one.yaml", data=data))
    return experiment, decide(
        experiment, experiment.hyperparameters, Where(context_dir=Path.cwd(), accelerator=CPU)
    )


def changes(before: dict[str, Any], now: dict[str, Any], **how: Any) -> Changes:
    was, made = asked(before)
    experiment, resolved = asked(now)
    told: Settings = settings_of(was, made.ds_config)
    return changes_since(told, experiment, resolved, written="checkpoint c", **how)


def test_nothing_has_changed() -> None:
    """However it is written: other launch words, a null, a search's point as a constant."""
    other = config(learning_rate={"type": "const", "val": 0.01}, fit={"max_length": {"batches": 4}})
    other["entrypoint"] = (
        "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:One"
    )
    other["description"] = None
    other["max_restarts"] = 0
    assert changes(config(), other) == Changes()


def test_what_takes_effect_is_told_with_both_values() -> None:
    found = changes(config(), config(learning_rate=0.001, width=7))
    assert found.problems == ()
    assert found.effective == (
        "hyperparameters.learning_rate: 0.01 -> 0.001",
        "hyperparameters.width: not given -> 7",
        "deepspeed optimizer.params.lr: 0.01 -> 0.001",
    )


def test_what_means_nothing_is_told() -> None:
    found = changes(config(), {**config(), "name": "two", "labels": ["a"]})
    assert found.idle == ("labels: not given -> ['a']", 'name: "one" -> "two"')
    assert (found.effective, found.problems) == ((), ())


def test_what_must_stay_is_refused_with_both_values_all_at_once() -> None:
    now = config(
        global_batch_size=16,
        overwrite_deepspeed_args={"type": "const", "val": {"optimizer": {"type": "Adagrad"}}},
    )
    now["entrypoint"] = now["entrypoint"].replace("trial:One", "other:One")
    now["reproducibility"] = {"experiment_seed": 7}
    found = changes(config(), now)
    told = {problem.key: str(problem) for problem in found.problems}
    assert set(told) == {
        "entrypoint",
        "reproducibility.experiment_seed",
        "deepspeed train_batch_size",
        "deepspeed optimizer.type",
    }
    assert (
        "= 16 (global_batch_size, one.yaml): was 8 when checkpoint c was written"
        in told["deepspeed train_batch_size"]
    )
    assert "fix: go back to 8, or start anew in another --run-dir" in told["deepspeed train_batch_size"]


def test_the_trials_seed_must_stay() -> None:
    [problem] = changes(config(), config(trial_seed=5)).problems
    assert (problem.key, problem.value) == ("hyperparameters.trial_seed", 5)
    assert f"was {first_trial_seed(0)} when checkpoint c was written" in problem.message
    assert changes(config(), config(trial_seed=first_trial_seed(0))) == Changes()


def test_a_fork_of_all_may_change_the_course_but_not_the_layout() -> None:
    now = config(global_batch_size=16, overwrite_deepspeed_args={"zero_optimization": {"stage": 2}})
    now["reproducibility"] = {"experiment_seed": 7}
    found = changes(config(), now, warm_start="all", refusal="it has no index")
    assert [problem.key for problem in found.problems] == ["deepspeed zero_optimization.stage"]
    assert "start anew, without it" in found.problems[0].fix


def restrategized(**overwrites: Any) -> dict[str, Any]:
    """The same training on four slots, in another way."""
    now = config(overwrite_deepspeed_args={"type": "const", "val": overwrites})
    now["resources"] = {"slots_per_trial": 4}
    return now


def test_the_strategy_may_change_and_is_said_in_a_line_each() -> None:
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    found = changes(config(), restrategized(zero_optimization=zero, train_micro_batch_size_per_gpu=1))
    assert found.problems == ()
    assert found.strategy[0] == "slots 2 -> 4"
    stage = "optimizer states, gradients and parameters are divided among the replicas"
    assert f"zero_stage 1 -> 3: {stage}" in found.strategy
    assert any("offload_optimizer.device" in line for line in found.strategy)
    assert any("train_micro_batch_size_per_gpu" in line for line in found.effective)


def test_a_pipeline_of_other_stages_is_another_strategy() -> None:
    assert "pipe_parallel_size 1 -> 2" in changes(config(), config(pipe_parallel_size=2)).strategy


def test_a_pipeline_of_another_schedule_is_another_strategy() -> None:
    """By what they come to: a default that is stated is no change."""
    stated = config(pipe_schedule="1f1b", pipe_chunks=1)
    assert changes(config(), stated).strategy == ()
    now = changes(config(), config(pipe_schedule="interleaved"))
    assert now.strategy == ("pipe_chunks 1 -> 2", "pipe_schedule 1f1b -> interleaved")


@pytest.mark.parametrize("refused_by", ["the checkpoint", "NVMe"])
def test_a_strategy_that_cannot_change_is_refused_with_the_reason(refused_by: str) -> None:
    device = "nvme" if refused_by == "NVMe" else "cpu"
    offload = {"device": device, **({"nvme_path": "/tmp"} if device == "nvme" else {})}
    now = restrategized(zero_optimization={"stage": 3, "offload_optimizer": offload})
    refusal = None if refused_by == "NVMe" else "its tensors have no index"
    found = changes(config(), now, refusal=refusal)
    told = {problem.key: problem.message for problem in found.problems}
    assert "deepspeed zero_optimization.stage" in told
    assert all(message.endswith(refusal or "cannot be filled from it") for message in told.values())


def test_an_optimizer_of_another_kind_needs_to_begin_anew() -> None:
    now = config(overwrite_deepspeed_args={"type": "const", "val": {"optimizer": {"type": "Adagrad"}}})
    [problem] = changes(config(), now).problems
    assert problem.key == "deepspeed optimizer.type"
    assert "--reset-optimizer" in problem.fix
    reset = changes(config(), now, resets_optimizer=True)
    assert reset.problems == ()
    assert any("optimizer.type" in line for line in reset.effective)
    [forked] = changes(config(), now, warm_start="all").problems
    assert "--reset-optimizer" not in forked.fix


def test_another_trial_of_the_same_module_is_another_strategy() -> None:
    now = config(pipe_parallel_size=2)
    now["entrypoint"] = "python3 -m determined_ds.train trial:Two"
    found = changes(config(), now)
    assert found.problems == ()
    assert found.strategy == ("trial One -> Two", "pipe_parallel_size 1 -> 2")
    now["entrypoint"] = "python3 -m determined_ds.train other:One"
    assert [problem.key for problem in changes(config(), now).problems] == ["entrypoint"]


def test_weights_alone_fit_any_strategy() -> None:
    overwrite = {"zero_optimization": {"stage": 2}, "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}}}
    now = config(overwrite_deepspeed_args={"type": "const", "val": overwrite})
    now["resources"] = {"slots_per_trial": 4}
    assert changes(config(), now, warm_start="weights").problems == ()
    staged = config(pipe_parallel_size=2)
    assert changes(config(), staged, warm_start="weights").problems == ()
    [problem] = changes(config(), staged, warm_start="weights", refusal="it has experts").problems
    assert problem.key == "hyperparameters.pipe_parallel_size"


def test_values_of_environment_variables_are_never_told() -> None:
    secret = {"environment": {"environment_variables": ["TOKEN=hunter2", "OTHER=1"]}}
    found = changes(config(), {**config(), **secret})
    assert found.effective == ("environment.environment_variables: not given -> ['OTHER', 'TOKEN']",)


def test_a_checkpoint_that_does_not_tell_is_not_compared() -> None:
    assert settings_before({}, None) is None


def test_differences_are_leaves() -> None:
    was = {"a": {"b": 1, "c": [1]}, "d": None, "e": {"f": 1}, "g": True}
    now = {"a": {"b": 1.0, "c": [2]}, "e": 2, "g": 1}
    found = {item.key: (item.was, item.now) for item in differences(was, now)}
    assert found == {"a.c": ([1], [2]), "e": ({"f": 1}, 2), "g": (True, 1)}
    assert [str(item) for item in differences({}, {"a": {"b": "x"}})] == ['a.b: not given -> "x"']
    assert next(differences({"a": 1}, {})).now is NOT_GIVEN


def test_adam_and_adamw_have_the_same_states() -> None:
    """What decays the weights changes from the next batch on."""
    types = ({"type": "const", "val": {"optimizer": {"type": kind}}} for kind in ("AdamW", "Adam"))
    was, now = (config(overwrite_deepspeed_args=each) for each in types)
    found = changes(was, now)
    assert found.problems == ()
    assert any("optimizer.type" in line for line in found.effective)
