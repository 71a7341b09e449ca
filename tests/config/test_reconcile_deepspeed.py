"""What is decided, DeepSpeed reads as it was meant; sizes agree exactly; what is wrong is refused before."""

from __future__ import annotations

import json
import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from determined_ds import Accelerator, ConfigError, Problem
from tests.config.deciding import AUTO, Json, optimizer, read_by_deepspeed, scheduler, told, zero
from tests.package import CPU, CUDA, OLD_CUDA, decide, rules

SMALL = st.sampled_from([1, 2, 3, 4, 8])
ENABLED = st.sampled_from([True, False, AUTO])
FP16 = {"loss_scale": st.sampled_from([0, 128]), "loss_scale_window": st.sampled_from([1, 100])}
SCHEDULERS = [
    scheduler(warmup_min_lr=AUTO),
    scheduler("WarmupDecayLR"),
    scheduler("LRRangeTest"),
    scheduler("WarmupCosineLR", total_num_steps=AUTO),
]
DTYPES = st.sampled_from(["fp32", "bf16", None, AUTO])
SETTINGS = {
    "fp16": st.fixed_dictionaries({"enabled": ENABLED}, optional=FP16),
    "bf16": st.fixed_dictionaries({"enabled": ENABLED}),
    "gradient_allreduce_op": st.sampled_from(["mean", AUTO]),
    "gradient_clipping": st.sampled_from([0, 0.5, AUTO]),
    "steps_per_print": st.sampled_from([1, 10, None, AUTO]),
    "scheduler": st.sampled_from([each["scheduler"] for each in SCHEDULERS]),
    "data_types": st.fixed_dictionaries({"grad_accum_dtype": DTYPES}),
}
OFFLOAD = st.fixed_dictionaries(
    {"device": st.sampled_from(["none", "cpu", "nvme"])},
    optional={"pin_memory": st.just(AUTO), "nvme_path": st.just("/nvme")},
)
ZERO = {
    "offload_optimizer": st.none() | OFFLOAD.map(lambda offload: {**offload, "ratio": 1}),
    "offload_param": st.none() | OFFLOAD,
    "reduce_bucket_size": st.sampled_from([5e8, 1000, AUTO]),
    "overlap_comm": st.sampled_from([True, False, None, AUTO]),
    "zero_hpz_partition_size": SMALL,
    "zero_quantized_weights": st.booleans(),
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def few(options: dict[str, st.SearchStrategy[Any]]) -> st.SearchStrategy[Json]:
    """Some of the settings, so few that they often go together."""
    keys = st.lists(st.sampled_from(sorted(options)), max_size=2, unique=True)
    return keys.flatmap(lambda chosen: st.fixed_dictionaries({key: options[key] for key in chosen}))


@given(st.data())
def test_what_is_accepted_deepspeed_accepts_with_the_same_batch(data: st.DataObject) -> None:
    """Of a topology and a batch that agree, and settings of which some exclude each other."""

    def one_of(*options: Any) -> Any:
        return data.draw(st.sampled_from(options))

    model, replicas, micro, steps = (data.draw(SMALL) for _ in range(4))
    pipe = one_of(1, 1, 1, 2, 4)
    batch = dict(zip(BATCH, (micro * steps * replicas, micro, steps), strict=True))
    stated = one_of(BATCH, BATCH[:2], BATCH[::2])
    hp: Json = {"pipe_parallel_size": pipe, "model_parallel_size": model, "learning_rate": 0.1}
    hp["fit"] = {"max_length": {"batches": 20}}
    ds = {key: batch[key] if key in stated else one_of(AUTO, None) for key in BATCH}
    if one_of(True, False):
        hp["global_batch_size"] = ds.pop(BATCH[0])
    if one_of(True, False):
        hp["data_parallel_world_size"] = one_of(replicas, AUTO)
    ds |= data.draw(few(SETTINGS)) | optimizer(one_of("AdamW", "adam", "SGD", "Lamb"), lr=AUTO)
    ds |= zero(one_of(0, 1, 2, 2.0, 3, 3, AUTO), **data.draw(few(ZERO)))
    accelerator = Accelerator(**{**vars(one_of(CPU, CUDA, OLD_CUDA)), "num_devices": 512})
    try:
        resolved = decide(hp, ds, slots=pipe * model * replicas, accelerator=accelerator)
    except ConfigError as refused:
        codes = {problem.code for problem in refused.problems}
        assert codes <= {rule.code for rule in rules()}, "the sizes agree: only a rule can be broken"
        return
    given = json.loads(json.dumps(resolved.ds_config, allow_nan=False))
    assert given == resolved.ds_config
    assert {key: given[key] for key in BATCH} == batch
    assert resolved.topology.data_parallel_world_size == replicas
    theirs = read_by_deepspeed(given, replicas)
    assert {key: getattr(theirs, key) for key in BATCH} == batch
    assert int(theirs.zero_optimization_stage) == resolved.zero_stage
    assert theirs.gradient_clipping == given["gradient_clipping"]
    assert theirs.bfloat16_config.enabled == given.get("bf16", {}).get("enabled", False)


SIZES, FACTORS = st.integers(1, 48), st.integers(1, 12)
MANY = Accelerator(name="cuda", num_devices=10**18, bf16=True, fp16=True)
TOTAL, MICRO, STEPS = "global_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"
DEGREES = ("pipe_parallel_size", "model_parallel_size", "sequence_parallel_size")
Numbers = dict[str, int]


def problem_of(code: str, numbers: Numbers, slots: int) -> Problem | None:
    """What is wrong with sizes of a kind, if anything; each problem of any kind has a fix."""
    ds = {name: number for name, number in numbers.items() if name in (MICRO, STEPS)}
    hp = {name: number for name, number in numbers.items() if name not in ds}
    problems, _ = told(hp, ds, slots=slots, accelerator=MANY)
    assert all(problem.fix for problem in problems)
    found = [each for each in problems if each.code.startswith(code)]
    assert len(found) <= 1
    return found[0] if found else None


@given(SIZES, SIZES, SIZES, st.sets(st.sampled_from([TOTAL, MICRO, STEPS]), min_size=1))
def test_numbers_that_determine_the_rest_are_completed(
    micro: int, steps: int, replicas: int, names: set[str]
) -> None:
    """An accumulation that nobody states is 1."""
    if names == {STEPS}:
        problem = problem_of("batch", {STEPS: steps}, replicas)
        assert problem
        assert problem.code == "batch-missing"
        return
    steps = 1 if len(names) == 1 else steps
    whole = {TOTAL: micro * steps * replicas, MICRO: micro, STEPS: steps}
    ds = {name: whole[name] for name in names - {TOTAL}}
    hp = {name: whole[name] for name in names & {TOTAL}}
    batch = decide(hp, ds, slots=replicas, accelerator=MANY).batch
    found = (batch.global_batch_size, batch.micro_batch_size, batch.accumulation, batch.replicas)
    assert found == (*whole.values(), replicas)


@given(st.fixed_dictionaries({TOTAL: SIZES}, optional={MICRO: FACTORS, STEPS: FACTORS}), FACTORS)
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(stated: Numbers, replicas: int) -> None:
    problem, total = problem_of("batch", stated, replicas), stated[TOTAL]
    product = replicas * math.prod(stated.values()) // total
    assert (problem is None) == (total == product if len(stated) == 3 else total % product == 0)
    if problem is not None:
        assert (problem.key, problem.value) == (f"hyperparameters.{TOTAL}", total)
        above = product if len(stated) == 3 else total - total % product + product
        assert str(above) in problem.fix.split()


@given(slots=SIZES, sizes=st.tuples(*[st.integers(1, 8)] * 3))
def test_degrees_divide_the_slots_or_are_refused(slots: int, sizes: tuple[int, ...]) -> None:
    stated, per_replica = dict(zip(DEGREES, sizes, strict=True)), math.prod(sizes)
    problem = problem_of("topology", stated, slots)
    assert (problem is None) == (slots % per_replica == 0)
    if problem is None:
        for replicas in (slots // per_replica, slots // per_replica + 1):
            wrong = problem_of("topology", {**stated, "data_parallel_world_size": replicas}, slots)
            assert (wrong is None) == (replicas * per_replica == slots)
    else:
        assert (problem.key, problem.value) == ("slots_per_trial", slots)
