"""Choices become candidates where they can run and fit; the rest is dropped before anything starts, and counted."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import ConfigError, Problem
from determined_ds.memory import ModelShape
from determined_ds.tune.axes import AXES, choices_of
from determined_ds.tune.candidates import Candidate, candidates_of, reference_of
from determined_ds.tune.cost import memory_bytes
from determined_ds.tune.variants import Variant
from tests.tune.bases import CONST, CPU, CUDA, OVER, PLENTY, SHAPE, TEMPLATES, base_of, shape_of

CAUSAL_LM = Path("experiments/causal_lm/const.yaml")


def how_it_runs(candidate: Candidate) -> str:
    """All that a run depends on, but for what says the same in other words."""
    variant = candidate.variant
    assert variant.experiment is not None
    assert variant.resolved is not None
    hparams = {
        key: value for key, value in variant.experiment.hyperparameters.data.items() if value is not False
    }
    hparams.pop("deepspeed_config")
    hparams["sdpa_kernel"] = variant.resolved.sdpa_kernel
    decided = [variant.resolved.ds_config, str(variant.resolved.topology), variant.experiment.trial]
    return json.dumps([*decided, hparams], sort_keys=True, default=str)


@given(st.sampled_from(TEMPLATES), st.sets(st.sampled_from(sorted(AXES)), min_size=1, max_size=3).map(sorted))
def test_every_candidate_can_run_and_no_two_run_alike(config: Path, over: list[str]) -> None:
    """The experiment as it is comes first, and is named so."""
    found = candidates_of(base_of(config, accelerator=CUDA), over, shape_of, PLENTY)
    assert all(candidate.variant.can_run for candidate in found.possible)
    assert found.possible[0].name.startswith("as it is (")
    assert found.possible[0].variant.choice == found.possible[0].base.own
    assert len({candidate.name for candidate in found.possible}) == len(found.possible)
    runs = {how_it_runs(candidate) for candidate in found.possible}
    assert len(runs) == len(found.possible)
    # The tiny GPT-2 in four stages has no layers for a second chunk of each; zb-h1 computes nothing again.
    assert all("4 layers" in reason or "zb-h1" in reason for reason in found.dropped)


def test_an_experiment_tuned_before_has_as_many_ways() -> None:
    """What it states, none of the others repeats."""
    again = base_of(
        CAUSAL_LM,
        "hyperparameters.activation_checkpointing=true",
        "hyperparameters.torch_compile=true",
        "hyperparameters.sdpa_kernel=math",
        "hyperparameters.overwrite_deepspeed_args.optimizer.params={torch_adam: true, fused: true}",
        "hyperparameters.overwrite_deepspeed_args.zero_optimization.reduce_bucket_size=5000000",
        "hyperparameters.overwrite_deepspeed_args.zero_optimization.allgather_bucket_size=5000000",
    )
    over = ["activation_checkpointing", "compile", "attention", "fused_optimizer"]
    sizes = choices_of(again, ["buckets"])[0]
    assert [choice.bucket_size for choice in sizes] == [None, 50_000_000]
    found = candidates_of(again, over, shape_of, PLENTY).possible
    assert len(found) == len(candidates_of(base_of(CAUSAL_LM), over, shape_of, PLENTY).possible) == 2**4
    assert len({how_it_runs(candidate) for candidate in found}) == len(found)


def test_what_cannot_run_is_counted_by_its_reason() -> None:
    """Here two replicas of a batch that they cannot share: a pipeline of both can."""
    batch = (
        "hyperparameters.global_batch_size",
        "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps",
    )
    base = base_of(Path("experiments/gpt2/pipeline.yaml"), *(f"{key}=31" for key in batch))
    found = candidates_of(base, ["zero_stage", "pipeline"], shape_of, PLENTY)
    assert [candidate.variant.choice.pipe_parallel_size for candidate in found.possible] == [2]
    [(reason, count)] = found.dropped.items()
    assert "global_batch_size" in reason
    assert count == 4


def test_orders_that_the_micro_batches_or_the_layers_do_not_make_are_dropped() -> None:
    """Of tiny GPT-2 in four stages: two parts a rank are eight; three micro-batches make no order of DualPipeV."""
    base = base_of(Path("experiments/gpt2/pipeline4.yaml"))
    found = candidates_of(base, ["pipe_schedule"], shape_of, PLENTY)
    assert [each.variant.choice.pipe_schedule for each in found.possible] == [None, "zb-h1"]
    assert found.dropped == {"8 parts are more than the model's 4 layers": 2}
    few = base_of(
        Path("experiments/gpt2/pipeline.yaml"),
        "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=2",
    )
    found = candidates_of(few, ["pipe_schedule"], shape_of, PLENTY)
    assert [each.variant.choice.pipe_schedule for each in found.possible] == [None, "interleaved", "zb-h1"]
    [(reason, count)] = found.dropped.items()
    assert "dualpipev needs 2 micro-batches a rank" in reason
    assert count == 1


def test_what_a_trial_refuses_is_dropped_but_not_the_experiment_as_it_is() -> None:
    def refused(variant: Variant) -> ModelShape:
        if variant.choice.pipe_chunks == 4 or refuses_all:
            message = "8 parts, and type:Block matches 4 layers."
            raise ConfigError(Problem(key="hyperparameters.pipe_chunks", message=message, fix="fewer chunks"))
        return SHAPE

    base, over, refuses_all = (
        base_of(Path("experiments/gpt2/pipeline.yaml")),
        ["pipe_schedule", "pipe_chunks"],
        False,
    )
    found = candidates_of(base, over, refused, PLENTY)
    assert [each.variant.choice.pipe_schedule for each in found.possible] == [
        None,
        "interleaved",
        "zb-h1",
        "dualpipev",
    ]
    assert found.dropped == {"8 parts, and type:Block matches 4 layers": 1}
    refuses_all = True
    with pytest.raises(ConfigError, match="type:Block matches 4 layers"):
        candidates_of(base, over, refused, PLENTY)


def test_what_does_not_fit_is_dropped() -> None:
    base = base_of()
    everything = candidates_of(base, OVER, shape_of, PLENTY).possible
    needed = sorted({memory_bytes(each.variant, each.shape) for each in everything})
    own = memory_bytes(everything[0].variant, SHAPE)
    assert own < needed[-1]
    found = candidates_of(base, OVER, shape_of, own)
    kept = {each.name for each in everything if memory_bytes(each.variant, each.shape) <= own}
    assert {each.name for each in found.possible} == kept
    assert found.dropped == {"it does not fit a rank's memory": len(everything) - len(kept)}


def test_an_experiment_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        candidates_of(base_of(), OVER, shape_of, 2**20)
    [problem] = caught.value.problems
    assert problem.key == "resources.slots_per_trial"
    assert problem.value == 2
    assert "here has 1 MiB" in problem.message
    assert "det-ds estimate" in problem.fix


def test_every_form_has_a_model_of_its_own_size() -> None:
    def shape(variant: Variant) -> ModelShape:
        return replace(SHAPE, num_parameters=10**6 * variant.choice.pipe_parallel_size)

    found = candidates_of(base_of(), ["pipeline"], shape, PLENTY).possible
    assert [each.shape.num_parameters for each in found] == [10**6, 2 * 10**6]


# ------------------------------------------------------------------------------------------ the reference


def test_the_loss_of_bf16_is_held_against_that_of_fp32() -> None:
    found = reference_of(base_of(accelerator=CUDA), shape_of)  # the template's bf16: auto
    assert found is not None
    assert found.variant.resolved is not None
    assert not found.variant.resolved.ds_config["bf16"]["enabled"]
    assert found.variant.choice.micro_batch_size == 16


def test_and_that_of_compiled_kernels_against_plain_ones() -> None:
    found = reference_of(base_of(CONST, "hyperparameters.torch_compile=true"), shape_of)
    assert found is not None
    assert found.variant.resolved is not None
    assert not found.variant.resolved.torch_compile


def test_an_experiment_in_fp32_is_its_own_reference() -> None:
    assert reference_of(base_of(accelerator=CPU), shape_of) is None
