"""What is chosen fits, divides, communicates least of what fits, and its files say so."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.create import create_deepspeed_config
from determined_ds.config.reconcile import ResolvedConfig, reconcile
from determined_ds.config.strategy import Strategy
from determined_ds.config.topology import nearest_divisor
from determined_ds.documents.document import Document
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.memory import fits, format_bytes, memory_per_rank
from determined_ds.memory.plan.choose import Plan, candidates, choose_plan, with_largest_micro_batch
from determined_ds.memory.plan.needs import possible_splits, read_needs
from determined_ds.memory.plan.rendered import GeneratedFiles, default_name, files_of
from determined_ds.memory.plan.stand_in import GPT2, GPT2_PIPELINE
from tests.experiments.master_code import create_errors
from tests.experiments.master_schemas import errors
from tests.making import refusal, refusals

ISSUE: dict[str, Any] = {
    "model_size": "6B",
    "gpus": 32,
    "gpu_memory": "80GiB",
    "global_batch_size": 64,
    "sequence_length": 2048,
}
CLUSTER_STORAGE = {"type": "shared_fs", "host_path": "/determined"}


def planned(**changes: Any) -> Plan:
    return choose_plan(read_needs(**{**ISSUE, **changes}))


def files(plan: Plan, trial: str = GPT2) -> GeneratedFiles:
    return files_of(plan, name="it", trial=trial, ds_config_path="experiments/deepspeed/it.json")


def decided(plan: Plan) -> tuple[Experiment, ResolvedConfig]:
    """What a run makes of the generated pair."""
    generated = files(plan)
    experiment = parse_experiment(parse_yaml(generated.experiment, "it.yaml"))
    gpus = Accelerator(name="cuda", num_devices=plan.needs.gpus, bf16=True, fp16=True)
    ds = Document(name="it.json", data=generated.ds_config)
    return experiment, reconcile(experiment.hyperparameters, ds, slots=experiment.slots, accelerator=gpus)


@st.composite
def asked(draw: st.DrawFn) -> dict[str, Any]:
    """Answers that go together."""
    gpus = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 16, 32, 64, 96, 512]))
    pipeline = nearest_divisor(gpus, draw(st.sampled_from([1, 1, 2, 4, 8])))
    assert pipeline is not None
    offload = draw(st.sampled_from(["none", "auto", "cpu", "nvme"]))
    assume(offload in ("none", "auto") or pipeline == 1)
    num_heads, tokens = (
        draw(st.sampled_from([1, 1, 12, 32])),
        draw(st.sampled_from([1, 128, 1024, 2048, 8192])),
    )
    batch = gpus // pipeline * draw(st.integers(1, 96))
    if draw(st.booleans()):
        batch = draw(st.integers(1, gpus))
        assume(possible_splits(gpus, pipeline, batch, math.gcd(num_heads, tokens)))
    return {
        "model_size": draw(st.sampled_from(["50M", "124M", "1.5B", "6B", "13B", "30B", "70B", "175B"])),
        "gpus": gpus,
        "gpu_memory": draw(st.sampled_from(["8GiB", "16GB", "24GiB", "40GiB", "80GiB", "141GB"])),
        "global_batch_size": batch,
        "sequence_length": tokens,
        "num_heads": num_heads,
        "precision": draw(st.sampled_from(["bf16", "fp16", "fp32"])),
        "offload": offload,
        "nvme_path": "/local_nvme" if offload == "nvme" else "",
        "pipeline": pipeline,
    }


def same(left: Strategy, right: Strategy) -> bool:
    """The same but for the batch, and the order of a pipeline."""
    one = {"micro_batch_size": 1, "accumulation": 1}
    return dataclasses.replace(plain(left), **one) == dataclasses.replace(plain(right), **one)


def plain(strategy: Strategy) -> Strategy:
    """The same, as candidates are: under 1F1B."""
    return dataclasses.replace(strategy, pipe_schedule="1f1b", pipe_chunks=1, partition_method=None)


MANY = settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(asked())
def test_what_is_chosen_fits_divides_and_runs_as_chosen(answers: dict[str, Any]) -> None:
    try:
        plan = planned(**answers)
    except ConfigError:
        assert refusal(lambda: planned(**answers)).code == "nothing-fits"
        return
    needs, strategy = plan.needs, plan.strategy
    assert plan.memory == memory_per_rank(needs.shape, strategy)
    assert fits(needs.shape, strategy, needs.gpu_memory_bytes)
    assert strategy.slots == needs.gpus
    assert strategy.micro_batch_size * strategy.accumulation * strategy.replicas == needs.global_batch_size
    experiment, resolved = decided(plan)
    assert experiment.slots == needs.gpus
    checkpointing = strategy.activation_checkpointing
    assert experiment.hyperparameters.get(("activation_checkpointing",)) is checkpointing
    assert resolved.strategy == strategy
    assert {warning.code for warning in resolved.warnings} <= {"pipeline-bubble"}
    if strategy.accumulation >= strategy.pipe_parallel_size:
        assert not resolved.warnings
    assert all(choice.value and re.search("[0-9]|GPU|--|permitted", choice.reason) for choice in plan.choices)


@MANY
@given(asked())
def test_nothing_that_communicates_less_fits(answers: dict[str, Any]) -> None:
    needs = read_needs(**answers)
    cheaper = list(candidates(needs))
    try:
        plan = choose_plan(needs)
    except ConfigError:
        assert not any(fits(needs.shape, strategy, needs.gpu_memory_bytes) for strategy in cheaper)
        return
    assert any(same(strategy, plan.strategy) for strategy in cheaper)
    for strategy in itertools.takewhile(lambda s: not same(s, plan.strategy), cheaper):
        assert not fits(needs.shape, strategy, needs.gpu_memory_bytes)
    assert with_largest_micro_batch(needs, plain(plan.strategy)) == plain(plan.strategy)


@MANY
@given(asked())
def test_every_way_out_is_one(answers: dict[str, Any]) -> None:
    """What a refusal advises is taken."""
    try:
        planned(**answers)
    except ConfigError as error:
        (problem,) = error.problems
        ways = re.findall(r"--([a-z-]+) ([0-9a-zA-Z]+)", problem.fix)
        assert ways
        for flag, value in ways:
            name = flag.replace("-", "_")
            change = {name: int(value) if name in ("gpus", "pipeline") else value}
            assert planned(**{**answers, **change})


@pytest.mark.parametrize(
    ("changes", "zero_stage", "offloaded", "checkpointing", "micro_batch"),
    [
        ({}, 1, "", False, 2),
        ({"model_size": "1.5B"}, 0, "", False, 2),
        ({"model_size": "30B"}, 2, "", True, 1),
        ({"model_size": "70B"}, 3, "", True, 2),
        ({"pipeline": 4}, 1, "", False, 1),
        ({"pipeline": 4, "global_batch_size": 512}, 1, "", False, 4),
        ({"pipeline": 4, "precision": "fp16"}, 1, "", False, 1),
        ({"offload": "auto"}, 1, "", False, 2),
        ({"offload": "cpu"}, 1, "optimizer", False, 2),
        ({"offload": "nvme", "nvme_path": "/nvme"}, 3, "optimizer", False, 2),
        ({"model_size": "13B", "gpus": 1, "offload": "auto"}, 1, "optimizer", False, 1),
        ({"model_size": "70B", "gpus": 1, "offload": "cpu"}, 3, "both", False, 1),
    ],
)
def test_the_cheapest_that_fits_is_chosen(
    changes: dict[str, Any], zero_stage: int, offloaded: str, checkpointing: bool, micro_batch: int
) -> None:
    found = planned(**changes).strategy
    both = {(False, False): "", (True, False): "optimizer", (True, True): "both"}
    assert found.zero_stage == zero_stage
    assert both[bool(found.offload_optimizer), bool(found.offload_param)] == offloaded
    assert found.activation_checkpointing == checkpointing
    assert found.micro_batch_size == micro_batch
    assert found.pipe_parallel_size == changes.get("pipeline", 1)


def test_the_reasons_have_the_numbers_of_the_memory_model() -> None:
    plan = planned()
    reason = plan.choice("zero_optimization.stage").reason
    assert format_bytes(plan.memory.total_bytes) in reason
    assert format_bytes(plan.memory.model_states_bytes) in reason
    zero0 = next(candidates(plan.needs))
    assert f"ZeRO 0 would need {format_bytes(memory_per_rank(plan.needs.shape, zero0).total_bytes)}" in reason
    assert "64 samples / 32 replicas = 2 each" in plan.choice("train_micro_batch_size_per_gpu").reason
    assert [choice.key for choice in plan.choices] == [
        "zero_optimization.stage",
        "offload",
        "precision",
        "pipe_parallel_size",
        "train_micro_batch_size_per_gpu",
        "gradient_accumulation_steps",
        "activation_checkpointing",
    ]


# ------------------------------------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("changes", "key", "said", "fix"),
    [
        ({"model_size": "6X"}, "--model-size", "the unit X must be one of", "6B"),
        ({"model_size": ""}, "--model-size", "a number above 0", "6B"),
        ({"gpu_memory": "lots"}, "--gpu-memory", "a number above 0", "80GiB"),
        ({"gpus": 0}, "--gpus", "1 or more", "positive"),
        ({"gpus": 2**31}, "--gpus", "at most", "smaller"),
        ({"sequence_length": 0}, "--sequence-length", "1 or more", "positive"),
        ({"global_batch_size": -3}, "--global-batch-size", "1 or more", "positive"),
        ({"global_batch_size": 70}, "--global-batch-size", "32 replicas", "64 or 96"),
        ({"global_batch_size": 7}, "--global-batch-size", "32 replicas", "--global-batch-size 32"),
        ({"pipeline": 3}, "--pipeline", "does not divide 32 GPUs", "30 or 33 GPUs, or --pipeline 2"),
        ({"pipeline": 0}, "--pipeline", "1 or more", "positive"),
        ({"gpus": 64, "pipeline": 64}, "--pipeline", "about 32 layers", "at most 32"),
        ({"precision": "bf61"}, "--precision", "must be one of bf16, fp16", "did you mean bf16?"),
        ({"offload": "disk"}, "--offload", "must be one of none, auto", "cpu, nvme"),
        ({"offload": "cpu", "pipeline": 4}, "--offload", "keeps its optimizer on the GPUs", "leave out"),
        ({"offload": "nvme"}, "--nvme-path", "missing", "--nvme-path /local_nvme"),
        ({"nvme_path": "/x"}, "--nvme-path", "is not used: --offload is none", "--offload nvme"),
    ],
)
def test_a_wrong_answer_is_refused_with_the_nearest_right_one(
    changes: dict[str, Any], key: str, said: str, fix: str
) -> None:
    found = refusal(lambda: planned(**changes))
    assert found.key == key
    assert said in found.message
    assert fix in found.fix


def test_all_wrong_answers_are_reported_at_once() -> None:
    wrong = {
        "model_size": "6X",
        "gpus": 0,
        "gpu_memory": "x",
        "global_batch_size": 0,
        "sequence_length": 0,
        "precision": "x",
        "offload": "x",
        "pipeline": 0,
    }
    keys = {problem.key for problem in refusals(lambda: planned(**wrong))}
    assert keys == {f"--{name.replace('_', '-')}" for name in wrong}


def test_where_nothing_fits_the_nearest_that_would_is_named() -> None:
    found = refusal(lambda: planned(model_size="13B", gpus=8, gpu_memory="24GiB"))
    assert "no strategy fits 8 GPUs of 24 GiB" in found.message
    assert "with one sample a micro-batch and activation checkpointing, ZeRO 3 needs" in found.message
    for way in ("--gpus 16", "--gpu-memory ", "--offload cpu (which takes "):
        assert way in found.fix


# --------------------------------------------------------------------------------------------------------- files


@MANY
@given(asked(), st.sampled_from([GPT2, GPT2_PIPELINE, "model_defs.mine.trial:Mine"]))
def test_the_master_takes_the_yaml(answers: dict[str, Any], trial: str) -> None:
    try:
        plan = planned(**answers)
    except ConfigError:
        return
    config = parse_yaml(files(plan, trial).experiment, "it.yaml").data
    assert errors(config, checkpoint_storage=CLUSTER_STORAGE) == []
    assert create_errors(config) == []
    assert config["hyperparameters"]["fit"]["max_length"] == {"batches": 1000}
    assert ("data" in config) == (trial != "model_defs.mine.trial:Mine")


def test_each_choice_is_explained_in_the_yaml() -> None:
    for changes in ({}, {"pipeline": 4}, {"offload": "cpu"}):
        plan = planned(**changes)
        text = files(plan).experiment
        said = " ".join(line.strip().lstrip("# ") for line in text.splitlines())
        for choice in plan.choices:
            assert f"{choice.key} {choice.value}: {choice.reason}." in said
        for key in (
            "global_batch_size",
            "pipe_parallel_size",
            "deepspeed_config",
            "activation_checkpointing",
            "fit",
        ):
            above = text.split(f"\n  {key}:")[0].splitlines()[-1]
            assert above.startswith("  #"), key
        assert max(len(line) for line in text.splitlines() if "entrypoint" not in line) <= 112


def test_the_json_is_what_the_public_function_makes() -> None:
    plan = planned(model_size="70B")
    assert files(plan).ds_config == create_deepspeed_config(
        zero_stage=3,
        micro_batch_size=2,
        precision="bf16",
        contiguous_gradients=True,
        overlap_comm=True,
        stage3_gather_16bit_weights_on_model_save=True,
    )


def test_offload_is_written_where_deepspeed_reads_it() -> None:
    config = files(planned(model_size="70B", gpus=1, offload="nvme", nvme_path="/nvme")).ds_config
    zero = config["zero_optimization"]
    assert (
        zero["offload_optimizer"]
        == zero["offload_param"]
        == {
            "device": "nvme",
            "nvme_path": "/nvme",
            "pin_memory": "auto",
        }
    )


@pytest.mark.parametrize(
    ("model_size", "size", "stands_in"),
    [
        ("124M", "small", False),
        ("345M", "medium", False),
        ("1.5B", "xl", False),
        ("6B", "xl", True),
        ("9M", "tiny", True),
    ],
)
def test_gpt2_is_given_its_size(model_size: str, size: str, stands_in: bool) -> None:
    generated = files(planned(model_size=model_size))
    hyperparameters = parse_yaml(generated.experiment, "it.yaml").data["hyperparameters"]
    assert hyperparameters["model_size"] == size
    assert hyperparameters["sequence_length"] == 2048
    assert any("stands in for your model" in note for note in generated.notes) == stands_in


def test_the_sizes_are_those_that_gpt2_comes_in() -> None:
    from determined_ds.memory.plan.stand_in import HEADS, PARAMETERS
    from model_defs.gpt2.model import MODEL_SIZES

    assert list(PARAMETERS) == list(HEADS) == list(MODEL_SIZES)
    for name, size in MODEL_SIZES.items():
        layers, width = size["n_layer"], size["n_embd"]
        vocabulary = 256 if name == "tiny" else 50257
        parameters = layers * (12 * width**2 + 13 * width) + (vocabulary + 1024) * width + 2 * width
        assert PARAMETERS[name] == pytest.approx(parameters, rel=0.15)
        assert HEADS[name] == size["n_head"]


def test_the_names_of_the_files_say_what_is_in_them() -> None:
    assert default_name(planned()) == "6b_zero1_32gpu"
    assert default_name(planned(pipeline=4)) == "6b_pipeline4_zero1_32gpu"
    assert default_name(planned(offload="cpu")) == "6b_zero1_offload_32gpu"


def test_another_trial_gets_no_hyperparameter_of_gpt2() -> None:
    generated = files(planned(), "model_defs.mine.trial:Mine")
    experiment = parse_experiment(parse_yaml(generated.experiment, "it.yaml"))
    assert experiment.trial == "model_defs.mine.trial:Mine"
    assert not {"model_size", "dropout"} & experiment.hyperparameters.data.keys()
    assert generated.notes == ()


def test_checkpointing_is_said_to_be_the_trials_but_of_gpt2_which_reads_it() -> None:
    plan = planned(model_size="30B")
    assert plan.strategy.activation_checkpointing
    own, gpt2 = files(plan, "model_defs.mine.trial:Mine"), files(plan)
    assert any("the trial must turn activation checkpointing on" in note for note in own.notes)
    assert "The trial has to read it" in own.experiment
    assert not any("checkpointing" in note for note in gpt2.notes)
    assert "The trial has to read it" not in gpt2.experiment


def test_a_bf16_pipeline_accumulates_in_fp32_under_zero_1() -> None:
    plan = planned(pipeline=4)
    assert files(plan).ds_config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert "accumulates gradients in fp32" in plan.choice("zero_optimization.stage").reason


def test_nothing_here_is_a_path_of_this_machine() -> None:
    assert str(Path.cwd()) not in files(planned()).experiment
