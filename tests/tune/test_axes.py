"""What a tuning has to choose from: every combination once, and for what is left out the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.tune.axes import AXES, choices_of, computes_bf16, name_of
from determined_ds.tune.choice import Base, Choice
from determined_ds.tune.stage_axes import Left
from tests.tune.bases import CONST, CPU, CUDA, TEMPLATES, base_of

PIPELINE = Path("experiments/gpt2/pipeline.yaml")
FP32 = "hyperparameters.overwrite_deepspeed_args.bf16.enabled=false"
# What an axis may change.
FIELDS = {
    "zero_stage": {"zero_stage", "zeropp"},
    "micro_batch": {"micro_batch_size"},
    "pipeline": {"pipe_parallel_size"},
    "pipe_schedule": {"pipe_schedule"},
    "pipe_chunks": {"pipe_chunks"},
    "partition_method": {"partition_method"},
    "offload": {"offload_optimizer", "offload_param"},
    "precision": {"precision"},
    "activation_checkpointing": {"activation_checkpointing"},
    "buckets": {"bucket_size"},
    "compile": {"torch_compile"},
    "fused_optimizer": {"fused_optimizer"},
    "attention": {"sdpa_kernel"},
}
subsets = st.sets(st.sampled_from(sorted(AXES)), min_size=1, max_size=5).map(sorted)


def searched(base: Base, *over: str) -> list[Choice]:
    return choices_of(base, over)[0]


def left_of(base: Base, *over: str) -> dict[str, str]:
    return {each.axis: each.reason for each in choices_of(base, over)[1]}


def values(choices: list[Choice], name: str) -> list[object]:
    return list(dict.fromkeys(getattr(choice, name) for choice in choices))


# ------------------------------------------------------------------------------------- every choice once


@given(st.sampled_from(TEMPLATES), subsets)
def test_every_choice_comes_once_by_a_name_of_its_own(config: Path, over: list[str]) -> None:
    """The experiment as it is comes first."""
    base = base_of(config, accelerator=CUDA)
    choices, left = choices_of(base, over)
    assert choices[0] == base.own
    assert len(set(choices)) == len(choices)
    names = Counter(name_of(base, choice) for choice in choices)
    assert [name for name, count in names.items() if count > 1] == []
    assert {each.axis for each in left} <= set(over)
    assert len(set(left)) == len(left)


@given(st.sampled_from(TEMPLATES), subsets)
def test_what_is_not_searched_stays(config: Path, over: list[str]) -> None:
    """But for what a new form of the experiment cannot keep: a pipeline has ZeRO 0 or 1, and its own micro-batch."""
    base = base_of(config, accelerator=CUDA)
    own = base.own
    for choice in choices_of(base, over)[0]:
        changed = {
            field.name for field in fields(Choice) if getattr(choice, field.name) != getattr(own, field.name)
        }
        allowed = set().union(*(FIELDS[axis] for axis in over))
        if choice.pipe_parallel_size != own.pipe_parallel_size:
            allowed |= {"zero_stage", "zeropp", "micro_batch_size"}
        if changed & {"zero_stage", "pipe_parallel_size"}:
            allowed |= {"offload_optimizer", "offload_param"}
        assert changed <= allowed
        if "zero_stage" not in over and choice.pipe_parallel_size > 1 == own.pipe_parallel_size:
            assert choice.zero_stage == min(
                own.zero_stage, 1 if choice.slots > choice.pipe_parallel_size else 0
            )


def test_the_template_on_two_slots() -> None:
    """Four stages of five micro-batches, and a pipeline of five: each in two precisions."""
    base = base_of(CONST, FP32, accelerator=CUDA)
    choices = searched(base, "zero_stage", "micro_batch", "pipeline", "precision")
    assert len(choices) == (4 * 5 + 5) * 2 == 50
    assert values(choices, "precision") == [None, "bf16"]
    assert len(searched(base_of(), "zero_stage", "micro_batch", "pipeline")) == 25


# -------------------------------------------------------------------------------------------- axis by axis


def test_zero_stages() -> None:
    assert values(searched(base_of(), "zero_stage"), "zero_stage") == [1, 0, 2, 3]
    assert {choice.micro_batch_size for choice in searched(base_of(), "zero_stage")} == {16}


def test_pipelines_are_as_deep_as_divides_the_slots() -> None:
    base = base_of(slots=8)
    forms = {(c.pipe_parallel_size, c.zero_stage) for c in searched(base, "zero_stage", "pipeline")}
    replicas = {(1, stage) for stage in range(4)}
    assert forms == replicas | {(2, 0), (2, 1), (4, 0), (4, 1), (8, 0)}


@given(st.integers(1, 64), st.sampled_from([1, 2, 4, 8]))
def test_micro_batches_divide_a_replicas_share(share: int, slots: int) -> None:
    """Powers of two and the whole of it; every stage of a pipeline has one to work on."""
    base = base_of(CONST, f"hyperparameters.global_batch_size={share * slots}", slots=slots)
    for choice in searched(base, "micro_batch", "pipeline"):
        replicas = slots // choice.pipe_parallel_size
        size = choice.micro_batch_size
        if size is None or choice == base.own:
            continue
        count, rest = divmod(share * slots // replicas, size)
        assert rest == 0
        assert count >= choice.pipe_parallel_size
    flat = [choice.micro_batch_size for choice in searched(base, "micro_batch")]
    assert len(flat) <= 9
    assert share in flat


def test_a_pipeline_has_schedules_and_chunks() -> None:
    """Each once: interleaved has 2 chunks where none are stated, and 1f1b is the experiment's own."""
    base = base_of(PIPELINE)
    axes = ("pipe_schedule", "pipe_chunks")
    own = (None, None)
    orders = [(c.pipe_schedule, c.pipe_chunks) for c in searched(base, *axes)]
    assert orders == [own, ("interleaved", None), ("interleaved", 4), ("zb-h1", None), ("dualpipev", None)]
    assert [c.pipe_chunks for c in searched(base, "pipe_schedule")] == [None] * 4
    interleaved = base_of(PIPELINE, "hyperparameters.pipe_schedule=interleaved")
    assert [(c.pipe_schedule, c.pipe_chunks) for c in searched(interleaved, "pipe_chunks")] == [
        own,
        ("interleaved", 4),
    ]
    assert {(c.pipe_parallel_size, c.pipe_schedule) for c in searched(base_of(), "pipeline", *axes)} == {
        (1, None),
        *((2, schedule) for schedule in (None, "interleaved", "zb-h1", "dualpipev")),
    }


def test_a_pipelines_layers_are_shared_out_by_their_times_too() -> None:
    method = "partition_method"
    assert values(searched(base_of(PIPELINE), method), method) == [None, "measured"]
    measured = base_of(PIPELINE, "hyperparameters.partition_method=measured")
    assert values(searched(measured, method), method) == [None]
    assert "by their times already" in left_of(measured, method)[method]
    assert values(searched(base_of(), method, "pipeline"), method) == [None, "measured"]


def test_orders_of_nothing_are_left_out() -> None:
    axes = ("pipe_schedule", "pipe_chunks", "partition_method")
    assert left_of(base_of(), *axes) == dict.fromkeys(axes, "no pipeline is searched")
    assert left_of(base_of(PIPELINE), "pipe_chunks") == {
        "pipe_chunks": "1f1b has 1 a rank; search over pipe_schedule too"
    }


def test_offload_on_gpus_only_where_zero_splits_something() -> None:
    base = base_of(accelerator=CUDA)
    found = {
        (choice.zero_stage, choice.pipe_parallel_size, choice.offload_optimizer, choice.offload_param)
        for choice in searched(base, "zero_stage", "pipeline", "offload")
    }
    plain = {(stage, 1, False, False) for stage in range(4)} | {(0, 2, False, False)}
    assert found == plain | {(stage, 1, True, False) for stage in (1, 2, 3)} | {(3, 1, True, True)}
    assert left_of(base_of(), "offload") == {"offload": "a CPU has no other memory to offload to"}


def test_precision_is_offered_where_it_is_computed(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx512f avx512_bf16 amx_tile\n")
    assert computes_bf16(CPU, cpuinfo)
    cpuinfo.write_text("flags : fpu avx2 avx512f\n")
    assert not computes_bf16(CPU, cpuinfo)
    assert not computes_bf16(CPU, tmp_path / "missing")
    old = Accelerator(name="cuda", num_devices=2, bf16=False, fp16=True)
    assert computes_bf16(CUDA)
    assert "no instructions for bf16" in left_of(base_of(accelerator=old), "precision")["precision"]
    assert values(searched(base_of(accelerator=CUDA), "precision"), "precision") == [
        None
    ]  # it is bf16 already


@pytest.mark.parametrize("stated", ["true", "false"])
def test_a_switch_is_turned_the_other_way(stated: str) -> None:
    """Tuning what was tuned before may take back what is no gain any more."""
    other = stated == "false"
    for axis, name in (
        ("compile", "torch_compile"),
        ("activation_checkpointing", "activation_checkpointing"),
    ):
        choices = searched(base_of(CONST, f"hyperparameters.{name}={stated}"), axis)
        assert [getattr(choice, name) for choice in choices] == [None, other]
    params = f"{{torch_adam: true, fused: {stated}}}"
    fused = base_of(CONST, f"hyperparameters.overwrite_deepspeed_args.optimizer.params={params}")
    assert values(searched(fused, "fused_optimizer"), "fused_optimizer") == [None, other]
    own, other_kernel = ("math", "auto") if stated == "true" else ("auto", "math")
    attention = searched(base_of(CONST, f"hyperparameters.sdpa_kernel={own}"), "attention")
    assert values(attention, "sdpa_kernel") == [None, other_kernel]


def test_buckets_where_there_are_any() -> None:
    choices = searched(base_of(), "zero_stage", "buckets")
    found = {(choice.zero_stage, choice.bucket_size) for choice in choices}
    assert found == {(0, None)} | {(s, b) for s in (1, 2, 3) for b in (None, 5_000_000, 50_000_000)}


@pytest.mark.parametrize(
    ("axis", "config", "overrides", "reason"),
    [
        ("pipeline", "bert/const", (), "the trial's module has no PipelineTrial"),
        ("pipeline", "gpt2/const", ("resources.slots_per_trial=1",), "a pipeline needs two slots or more"),
        ("activation_checkpointing", "dcgan/const", (), "the model reads no hyperparameter of that name"),
        (
            "fused_optimizer",
            "gpt2/const",
            (
                "hyperparameters.overwrite_deepspeed_args="
                "{type: const, val: {optimizer: {type: Lamb}, zero_optimization: {stage: 0}}}",
            ),
            "torch has it for Adam, not for lamb",
        ),
    ],
)
def test_what_cannot_be_searched_is_left_out_with_its_reason(
    axis: str, config: str, overrides: tuple[str, ...], reason: str
) -> None:
    base = base_of(Path(f"experiments/{config}.yaml"), *overrides)
    choices, left = choices_of(base, [axis])
    assert left == [Left(axis=axis, reason=reason)]
    assert choices == [base.own]


def test_on_gpus_the_optimizer_is_fused_already() -> None:
    assert "fused already" in left_of(base_of(accelerator=CUDA), "fused_optimizer")["fused_optimizer"]
