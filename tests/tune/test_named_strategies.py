"""A strategy by its name changes how an experiment is carried out, and nothing of what is trained."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import ConfigError
from tests.package import CPU, EXPERIMENTS, ROOT, check, refusals, under_strategy

GPT2 = ROOT / "experiments" / "gpt2"
CONST, PIPELINE = GPT2 / "const.yaml", GPT2 / "pipeline.yaml"
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zb-h1", "dualpipev")
# Strategy -> ZeRO stage, whether optimizer and parameters are offloaded, pipeline stages; on two slots.
MEANING = {
    "ddp": (0, False, False, 1),
    "zero0": (0, False, False, 1),
    "zero1": (1, False, False, 1),
    "zero2": (2, False, False, 1),
    "zero3": (3, False, False, 1),
    "zero1_offload": (1, True, False, 1),
    "zero2_offload": (2, True, False, 1),
    "zero3_offload_optimizer": (3, True, False, 1),
    "zero3_offload": (3, True, True, 1),
    "zeropp": (3, False, False, 1),
    "pipeline": (0, False, False, 2),
    "pipeline_zero1": (1, False, False, 2),
    **dict.fromkeys(SCHEDULES, (0, False, False, 2)),
}


def settings(**values: Any) -> tuple[str, ...]:
    return tuple(f"hyperparameters.{name.replace('__', '.')}={value}" for name, value in values.items())


# ---------------------------------------------------------------------------------------- what a name means


@pytest.mark.parametrize("name", MEANING)
def test_a_name_means_what_it_says(name: str) -> None:
    """By what DeepSpeed would be given."""
    _, resolved = under_strategy(CONST, name, slots=2)
    stage, optimizer, param, stages = MEANING[name]
    zero = resolved.ds_config["zero_optimization"]
    assert resolved.zero_stage == stage
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (optimizer, param)
    assert resolved.topology.pipe_parallel_size == stages
    assert ("zero_quantized_weights" in zero) == (name == "zeropp")
    assert resolved.strategy.pipe_schedule == (name if name in SCHEDULES else "1f1b")
    assert resolved.topology.slots == 2


@given(
    st.sampled_from([path for path in EXPERIMENTS if "hf_trainer" not in str(path)]),
    st.sampled_from(list(MEANING)),
    st.sampled_from([1, 2, 4, 8]),
)
def test_everything_else_of_the_experiment_stays_and_the_result_passes_check(
    config: Path, name: str, slots: int
) -> None:
    """Model, data, seed, length, global batch; optimizer, scheduler and clipping. Or it is refused with reasons."""
    try:
        made, resolved = under_strategy(config, name, slots=slots)
    except ConfigError:
        assert refusals(lambda: under_strategy(config, name, slots=slots))
        return
    before = yaml.safe_load(config.read_text())
    batch = resolved.batch
    assert batch.micro_batch_size * batch.accumulation * batch.replicas == batch.global_batch_size
    assert batch.global_batch_size == before["hyperparameters"]["global_batch_size"]
    assert made["resources"]["slots_per_trial"] == slots
    for key in ("data", "reproducibility", "environment"):
        assert made.get(key) == before.get(key)
    if before["searcher"]["name"] == "single":
        assert made["searcher"] == before["searcher"]
        assert without_strategy(made) == without_strategy(before)


def without_strategy(experiment: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters but for those that say how it is carried out."""
    found = copy.deepcopy(experiment["hyperparameters"])
    for key in ("deepspeed_config", "overwrite_deepspeed_args", "data_parallel_world_size", "zero_stage"):
        found.pop(key, None)
    for key in ("pipe_parallel_size", "pipe_schedule", "pipe_chunks", "partition_method"):
        found.pop(key, None)
    return found


def test_the_optimizer_and_what_steps_with_it_stay_to_the_letter() -> None:
    before = under_strategy(CONST, "zero1")[1].ds_config
    for name in MEANING:
        after = under_strategy(CONST, name)[1].ds_config
        for key in ("scheduler", "gradient_clipping", "train_batch_size"):
            assert after.get(key) == before.get(key)
        params = [{**each["optimizer"]["params"]} for each in (before, after)]
        for each in params:
            for kernel in ("torch_adam", "fused"):  # which of them is used follows from where the states are
                each.pop(kernel, None)
        assert params[0] == params[1]


def test_what_is_made_passes_check(tmp_path: Path) -> None:
    for name in ("zero3_offload", "pipeline_zero1", "dualpipev"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(under_strategy(CONST, name)[0]))
        [report] = check([path], context_dir=ROOT)
        assert not [finding for finding in report.findings if finding.severity == "error"]


# ---------------------------------------------------------------------------------------- batches


@given(st.integers(1, 64), st.integers(1, 32), st.integers(1, 8))
def test_the_micro_batch_stays_as_far_as_it_divides(times: int, micro: int, slots: int) -> None:
    """The largest that is no larger than the experiment's own and fills a replica's share."""
    own = settings(
        global_batch_size=times * micro, overwrite_deepspeed_args__train_micro_batch_size_per_gpu=micro
    )
    slots_of_base = "resources.slots_per_trial=1"
    share, rest = divmod(times * micro, slots)
    if rest:
        assert refusals(lambda: under_strategy(CONST, "zero0", *own, slots_of_base, slots=slots))
        return
    if times % slots:
        return  # the experiment itself does not divide on these slots
    _, resolved = under_strategy(CONST, "zero0", *own, slots_of_base, slots=slots)
    possible = [size for size in range(1, share + 1) if share % size == 0 and size <= micro]
    assert resolved.batch.micro_batch_size == max(possible)


def test_a_pipeline_gets_four_micro_batches_a_stage_where_they_divide() -> None:
    counts = {
        slots: under_strategy(CONST, "pipeline", slots=slots)[1].batch.accumulation for slots in (2, 4, 8)
    }
    assert counts == {2: 8, 4: 16, 8: 32}
    _, odd = under_strategy(CONST, "pipeline", *settings(global_batch_size=30))
    assert odd.batch.accumulation == 6  # of 30, the most up to 8


def test_a_pipeline_becomes_replicas_with_a_micro_batch_of_their_own() -> None:
    """A pipeline's is one of many of a step."""
    made, resolved = under_strategy(PIPELINE, "zero0")
    assert made["entrypoint"].endswith("model_defs.gpt2.trial:GPT2Trial")
    assert under_strategy(CONST, "pipeline")[0]["entrypoint"].endswith(":GPT2PipelineTrial")
    assert (resolved.batch.micro_batch_size, resolved.topology.data_parallel_world_size) == (16, 2)
    assert not {"pipe_schedule", "pipe_chunks"} & made["hyperparameters"].keys()


# ---------------------------------------------------------------------------------------- schedules


def test_a_schedule_is_that_of_the_experiments_own_pipeline() -> None:
    """Its stages, ZeRO stage and micro-batches stay; whatever it is scheduled by."""
    own = settings(
        pipe_schedule="dualpipev",
        global_batch_size=48,
        overwrite_deepspeed_args__gradient_accumulation_steps=6,
    )
    for name in SCHEDULES:
        strategy = under_strategy(GPT2 / "pipeline_zero1.yaml", name, *own, slots=4)[1].strategy
        assert (strategy.pipe_schedule, strategy.zero_stage) == (name, 1)
        assert (strategy.pipe_parallel_size, strategy.replicas, strategy.accumulation) == (2, 2, 6)
        assert strategy.pipe_chunks == (2 if name in ("interleaved", "dualpipev") else 1)


@pytest.mark.parametrize(("name", "micro_batches"), [("zb-h1", 3), ("interleaved", 2), ("dualpipev", 4)])
def test_micro_batches_that_a_schedule_cannot_order_become_the_nearest_that_it_can(
    name: str, micro_batches: int
) -> None:
    """Of those that keep the global batch: the most below, or else the fewest above."""
    own = settings(global_batch_size=36, overwrite_deepspeed_args__gradient_accumulation_steps=3)
    assert under_strategy(PIPELINE, name, *own)[1].batch.accumulation == micro_batches


# ---------------------------------------------------------------------------------------- what cannot be made

BY_HAND = "from determined.pytorch.deepspeed import DeepSpeedTrial\nclass Mine(DeepSpeedTrial): ...\n"
SCRIPT = "import determined_ds\nwith determined_ds.session() as s:\n    pass\n"
LAUNCH = "python3 -m determined.launch.torch_distributed python3"


@pytest.mark.parametrize(
    ("config", "name", "more", "said"),
    [
        (CONST, "pipeline", {"slots": 1}, "a pipeline needs two slots or more"),
        (CONST, "zeropp", {"accelerator": CPU}, "there is no CUDA device"),
        (ROOT / "experiments/bert/const.yaml", "pipeline", {}, "BertTrial has no stages"),
        (CONST, "zero1", {"slots": 3}, "is not a multiple of"),
    ],
    ids=["one slot", "on CPUs", "no stages", "does not divide"],
)
def test_what_cannot_run_is_refused(config: Path, name: str, more: dict[str, Any], said: str) -> None:
    assert any(said in problem.message for problem in refusals(lambda: under_strategy(config, name, **more)))


def test_an_odd_number_of_micro_batches_is_refused_with_what_the_schedule_needs() -> None:
    own = settings(global_batch_size=9, overwrite_deepspeed_args__gradient_accumulation_steps=3)
    [problem] = refusals(lambda: under_strategy(PIPELINE, "interleaved", *own))
    assert "2 chunks need a multiple of 2 micro-batches, not 3" in problem.message
    assert "change micro_batch_size or global_batch_size" in problem.fix


@pytest.mark.parametrize(
    ("file", "code", "entrypoint", "said"),
    [
        (
            "trial.py",
            BY_HAND,
            f"{LAUNCH} -m determined_ds.train trial:Mine",
            "calls deepspeed.initialize itself",
        ),
        ("train.py", SCRIPT, f"{LAUNCH} train.py", "a script makes its engine itself"),
    ],
    ids=["a trial by hand", "a script"],
)
def test_who_makes_the_engine_cannot_be_trained_by_ddp(
    file: str, code: str, entrypoint: str, said: str, tmp_path: Path
) -> None:
    """DeepSpeed would train in its place: known before a process is started."""
    (tmp_path / file).write_text(code)
    config = tmp_path / "own.yaml"
    ds_config = {"type": "const", "val": {"optimizer": {"type": "Adam", "params": {"lr": 0.1}}}}
    fit = {"max_length": {"batches": 4}}
    experiment = {
        "name": "own",
        "entrypoint": entrypoint,
        "resources": {"slots_per_trial": 2},
        "hyperparameters": {"global_batch_size": 8, "deepspeed_config": ds_config, "fit": fit},
        "searcher": {"name": "single", "metric": "loss"},
    }
    config.write_text(yaml.safe_dump(experiment))
    [problem] = refusals(lambda: under_strategy(config, "ddp"))
    assert said in problem.message
    made, resolved = under_strategy(config, "zero3")
    assert (made["entrypoint"], resolved.zero_stage) == (entrypoint, 3)
    if file == "train.py":
        [problem] = refusals(lambda: under_strategy(config, "pipeline"))
        assert "a script keeps the stages that its code builds" in problem.message
