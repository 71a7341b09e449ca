"""What "auto" and absence stand for: a hyperparameter, the accelerator, or DeepSpeed's default; and who filled it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.autofill import GRADIENT_CLIPPING, fill_what_is_known
from determined_ds.config.hyperparameters import parse_hyperparameters
from determined_ds.config.numbers import AUTO
from determined_ds.config.topology import Topology
from determined_ds.documents.document import get_path
from determined_ds.errors import ConfigError
from tests.making import CPU, CUDA, OLD_CUDA, decide, ds_json, hyperparameters, refusal, refusals

PARAMS = ("optimizer", "params")
SCHEDULE = ("scheduler", "params")


def fill(
    ds: str | dict[str, Any],
    hp: str | dict[str, Any] = "{}",
    *,
    accelerator: Accelerator = CPU,
    pipe: int = 1,
) -> Any:
    document = hyperparameters(hp)
    topology = Topology(pipe_parallel_size=pipe, model_parallel_size=1, data_parallel_world_size=2)
    fit = parse_hyperparameters(document).fit
    filled, problems = fill_what_is_known(ds_json(ds), document, fit, topology, accelerator)
    if problems:
        raise ConfigError(problems)
    return filled


def optimizer(kind: str = "AdamW", **params: Any) -> dict[str, Any]:
    return {"optimizer": {"type": kind, "params": params}}


def scheduler(kind: str = "WarmupLR", **params: Any) -> dict[str, Any]:
    return {"scheduler": {"type": kind, "params": params}}


@pytest.mark.parametrize(
    ("ds", "hp", "path", "value", "name"),
    [
        (optimizer(lr=AUTO), "learning_rate: 0.01", (*PARAMS, "lr"), 0.01, "learning_rate"),
        (optimizer(lr=AUTO), "lr: 0.01", (*PARAMS, "lr"), 0.01, "lr"),
        (optimizer(lr=AUTO), "learning_rate: 1.0e-3\nlr: 1", (*PARAMS, "lr"), 0.001, "learning_rate"),
        (optimizer(lr=1, eps=AUTO), "adam_epsilon: 1e-6", (*PARAMS, "eps"), 1e-6, "adam_epsilon"),
        (
            optimizer(lr=1, weight_decay=AUTO),
            "weight_decay: 0.1",
            (*PARAMS, "weight_decay"),
            0.1,
            "weight_decay",
        ),
        (optimizer(lr=1, betas=AUTO), "betas: [0.9, 0.95]", (*PARAMS, "betas"), [0.9, 0.95], "betas"),
        (
            optimizer(lr=1, betas=AUTO),
            "adam_beta1: 0.8\nadam_beta2: 0.9",
            (*PARAMS, "betas"),
            [0.8, 0.9],
            "adam_beta1",
        ),
        (
            scheduler(warmup_max_lr=AUTO),
            "learning_rate: 0.1",
            (*SCHEDULE, "warmup_max_lr"),
            0.1,
            "learning_rate",
        ),
        (
            scheduler(warmup_num_steps=AUTO),
            "warmup_steps: 7",
            (*SCHEDULE, "warmup_num_steps"),
            7,
            "warmup_steps",
        ),
        ({"gradient_clipping": AUTO}, "max_grad_norm: 0.5", ("gradient_clipping",), 0.5, "max_grad_norm"),
        ({"gradient_clipping": AUTO}, "gradient_clipping: 2", ("gradient_clipping",), 2, "gradient_clipping"),
        ({"steps_per_print": AUTO}, "steps_per_print: 10", ("steps_per_print",), 10, "steps_per_print"),
    ],
)
def test_a_hyperparameter_fills_auto(
    ds: dict[str, Any], hp: str, path: tuple[str, ...], value: Any, name: str
) -> None:
    filled = fill(ds, hp)
    assert filled.get(path) == value
    assert filled.origin(path) == f"{name}, hp.yaml:1"


@pytest.mark.parametrize(
    ("ds", "hp", "path", "value"),
    [
        (optimizer(), "learning_rate: 0.01", (*PARAMS, "lr"), 0.01),
        ({"optimizer": {"type": "adam"}}, "learning_rate: 0.01", (*PARAMS, "lr"), 0.01),
        (optimizer("SGD"), "learning_rate: 0.01", (*PARAMS, "lr"), 0.01),
        (optimizer(), "weight_decay: 0.1", (*PARAMS, "weight_decay"), 0.1),
        (optimizer(), "betas: [0.9, 0.95]", (*PARAMS, "betas"), [0.9, 0.95]),
        (scheduler(), "learning_rate: 0.01", (*SCHEDULE, "warmup_max_lr"), 0.01),
        (scheduler(), "warmup_num_steps: 5", (*SCHEDULE, "warmup_num_steps"), 5),
        (
            scheduler("WarmupDecayLR", warmup_max_lr=1),
            "fit: {max_length: {batches: 9}}",
            (*SCHEDULE, "total_num_steps"),
            9,
        ),
        ({}, "max_grad_norm: 0.5", ("gradient_clipping",), 0.5),
    ],
)
def test_a_hyperparameter_fills_what_is_absent(
    ds: dict[str, Any], hp: str, path: tuple[str, ...], value: Any
) -> None:
    """What DeepSpeed would take its own default for in silence, though the experiment says another."""
    filled = fill(ds, hp)
    assert filled.get(path) == value
    assert filled.origin(path).endswith(", hp.yaml:1")


def test_only_what_an_optimizer_takes_is_added_to_it() -> None:
    hp = "learning_rate: 0.1\nweight_decay: 0.1\nbetas: [0.9, 0.9]"
    assert fill({}, hp).data == {"gradient_clipping": 1.0}
    assert fill(optimizer("SGD"), hp).get(PARAMS) == {"lr": 0.1}
    assert fill(optimizer("Adagrad"), hp).get(PARAMS) == {"lr": 0.1, "weight_decay": 0.1}
    assert fill(scheduler("StepLR", step_size=2), hp).get(SCHEDULE) == {"step_size": 2}
    assert fill(optimizer(lr=1, torch_adam=False), "a: 1").get(PARAMS) == {"lr": 1, "torch_adam": False}


def test_what_is_stated_stands() -> None:
    hp = "learning_rate: 0.1\nweight_decay: 0.1\nmax_grad_norm: 5"
    stated = {**optimizer(lr=0.2, weight_decay=0, torch_adam=True), "gradient_clipping": 0.0}
    assert fill(stated, hp).data == stated


def test_a_hyperparameter_that_is_not_used_is_a_warning() -> None:
    """E.g. a search over a learning rate that the JSON states."""
    resolved = decide("global_batch_size: 8\nlearning_rate: 0.1", optimizer(lr=0.2))
    (warning,) = resolved.warnings
    assert str(warning) == (
        "hyperparameters.learning_rate = 0.1 (hp.yaml:2): is not used: the DeepSpeed JSON states"
        ' optimizer.params.lr = 0.2 (ds.json)\n  fix: write "auto" there to use the hyperparameter, or remove'
        " learning_rate"
    )
    assert decide("global_batch_size: 8\nlearning_rate: 0.2", optimizer(lr=0.2)).warnings == ()


@pytest.mark.parametrize(
    ("ds", "hp", "path", "fix"),
    [
        (optimizer(lr=AUTO), "{}", (*PARAMS, "lr"), "hyperparameter learning_rate"),
        (optimizer(lr=AUTO), "learning_rate: auto", (*PARAMS, "lr"), "hyperparameter learning_rate"),
        (scheduler(warmup_max_lr=AUTO), "{}", (*SCHEDULE, "warmup_max_lr"), "hyperparameter learning_rate"),
        (
            scheduler(warmup_num_steps=AUTO),
            "{}",
            (*SCHEDULE, "warmup_num_steps"),
            "hyperparameter warmup_num_steps",
        ),
        (scheduler(total_num_steps=AUTO), "{}", (*SCHEDULE, "total_num_steps"), "fit.max_length in batches"),
        (
            scheduler("WarmupCosineLR", total_num_steps=AUTO),
            "fit: {max_length: {epochs: 1}}",
            (*SCHEDULE, "total_num_steps"),
            "fit.max_length in batches",
        ),
        (
            scheduler("WarmupDecayLR", warmup_max_lr=1),
            "{}",
            (*SCHEDULE, "total_num_steps"),
            "fit.max_length in batches",
        ),
        (
            scheduler(warmup_max_lr=[AUTO, 1]),
            "learning_rate: 1",
            (*SCHEDULE, "warmup_max_lr", 0),
            "whole value",
        ),
    ],
)
def test_what_nothing_determines_is_told(
    ds: dict[str, Any], hp: str, path: tuple[str, ...], fix: str
) -> None:
    problem = refusal(lambda: fill(ds, hp))
    assert (problem.key, problem.code) == (".".join(map(str, path)), "auto-undetermined")
    assert fix in problem.fix


def test_all_that_nothing_determines_is_told_at_once() -> None:
    ds = {**optimizer(lr=AUTO), **scheduler(warmup_max_lr=AUTO, warmup_num_steps=AUTO, total_num_steps=AUTO)}
    assert len(refusals(lambda: fill(ds))) == 4


def test_what_deepspeed_has_a_default_for_is_left_to_it() -> None:
    ds = {**optimizer(lr=1, betas=AUTO, eps=AUTO, torch_adam=True), "zero_optimization": {"stage": AUTO}}
    filled = fill({**ds, "steps_per_print": AUTO, "gradient_clipping": 1.0})
    assert filled.data == {**optimizer(lr=1, torch_adam=True), "gradient_clipping": 1.0}


def test_clipping_is_said_where_nobody_said_it() -> None:
    """DeepSpeed clips unless it is told not to."""
    import deepspeed.runtime.constants as upstream

    assert upstream.GRADIENT_CLIPPING_DEFAULT == GRADIENT_CLIPPING
    for ds in ({}, {"gradient_clipping": AUTO}):
        filled = fill(ds)
        assert filled.get(("gradient_clipping",)) == GRADIENT_CLIPPING
        assert filled.origin(("gradient_clipping",)) == "DeepSpeed's default"
    assert fill({"gradient_clipping": 0}).get(("gradient_clipping",)) == 0


@pytest.mark.parametrize("kind", ["WarmupLR", "WarmupDecayLR"])
def test_a_warm_up_starts_with_its_first_step(kind: str) -> None:
    """Its share of the peak that is really used, wherever the peak comes from."""
    hp = "learning_rate: 0.5\nwarmup_num_steps: 10\nfit: {max_length: {batches: 50}}"
    start = (*SCHEDULE, "warmup_min_lr")
    assert fill(scheduler(kind, warmup_min_lr=AUTO), hp).get(start) == pytest.approx(0.05)
    stated = scheduler(kind, warmup_min_lr=AUTO, warmup_max_lr=1.0, warmup_num_steps=4)
    assert fill(stated, hp).get(start) == 0.25
    assert fill(scheduler(kind, warmup_min_lr=0.2), hp).get(start) == 0.2
    assert fill(scheduler(warmup_min_lr=AUTO)).get(start) == 0.0


@pytest.mark.parametrize(
    ("accelerator", "ds", "bf16", "fp16"),
    [
        (CPU, {"bf16": {"enabled": AUTO}}, False, None),
        (CUDA, {"bf16": {"enabled": AUTO}}, True, None),
        (OLD_CUDA, {"bf16": {"enabled": AUTO}}, False, None),
        (CUDA, {"bf16": AUTO}, True, None),
        (CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}, True, False),
        (OLD_CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}, False, True),
        (CPU, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": AUTO}}, False, False),
        (CUDA, {"bf16": {"enabled": AUTO}, "fp16": {"enabled": True}}, False, True),
        (CUDA, {"fp16": {"enabled": AUTO}}, None, True),
        (CPU, {"bf16": {"enabled": True}}, True, None),
        (CUDA, {}, None, None),
    ],
)
def test_precision_is_the_accelerators(
    accelerator: Accelerator, ds: dict[str, Any], bf16: Any, fp16: Any
) -> None:
    filled = fill(ds, accelerator=accelerator)
    for section, on in (("bf16", bf16), ("fp16", fp16)):
        assert filled.get((section, "enabled")) is on
        if get_path(ds, (section, "enabled"), AUTO) == AUTO and on is not None:
            assert filled.origin((section, "enabled")) == f"the accelerator: {accelerator.name}"


def test_a_bf16_pipeline_accumulates_in_fp32() -> None:
    dtype = ("data_types", "grad_accum_dtype")
    bf16: dict[str, Any] = {"bf16": {"enabled": AUTO}, "zero_optimization": {"stage": 1}}
    assert fill(bf16, accelerator=CUDA, pipe=2).get(dtype) == "fp32"
    assert (
        fill({"bf16": {"enabled": AUTO}}, accelerator=CUDA, pipe=2).get(dtype) is None
    )  # refused without ZeRO
    assert fill(bf16, accelerator=CUDA, pipe=1).get(dtype) is None
    assert fill(bf16, accelerator=CPU, pipe=2).get(dtype) is None
    stated = {**bf16, "data_types": {"grad_accum_dtype": "bf16"}}
    assert fill(stated, accelerator=CUDA, pipe=2).get(dtype) == "bf16"


def test_memory_is_pinned_for_cuda_only() -> None:
    path = ("zero_optimization", "offload_optimizer", "pin_memory")
    ds = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": AUTO}}}
    assert fill(ds, accelerator=CPU).get(path) is False
    assert fill(ds, accelerator=CUDA).get(path) is True
    assert fill(ds, accelerator=CUDA).origin(path) == "the accelerator: cuda"


def test_a_cpu_takes_torchs_own_adam() -> None:
    """So that nothing has to be compiled before the first step."""
    path = (*PARAMS, "torch_adam")
    for kind in ("Adam", "AdamW", "adamw"):
        assert fill(optimizer(kind, lr=1), accelerator=CPU).get(path) is True
        assert fill(optimizer(kind, lr=1), accelerator=CPU).get((*PARAMS, "fused")) is None
    assert fill(optimizer(lr=1, torch_adam=False), accelerator=CPU).get(path) is False
    assert fill(optimizer("Lamb", lr=1), accelerator=CPU).get(path) is None
    assert fill({}, accelerator=CPU).get(("optimizer",)) is None


def of_adam(ds: dict[str, Any]) -> tuple[Any, Any]:
    """What a JSON's ``torch_adam`` and ``fused`` are on GPUs."""
    filled = fill(ds, accelerator=CUDA)
    return filled.get((*PARAMS, "torch_adam")), filled.get((*PARAMS, "fused"))


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "adamw"])
def test_a_gpu_takes_torchs_fused_adam_which_needs_no_compiler(kind: str) -> None:
    assert of_adam(optimizer(kind, lr=1)) == (True, True)
    assert of_adam(optimizer(kind, lr=1, torch_adam=AUTO, fused=AUTO)) == (True, True)
    assert of_adam(
        {**optimizer(kind, lr=1), "zero_optimization": {"offload_optimizer": {"device": "none"}}}
    ) == (
        True,
        True,
    )


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"torch_adam": False}, (False, None)),
        ({"torch_adam": True}, (True, None)),
        ({"fused": False}, (True, False)),
        ({"foreach": True}, (True, None)),  # torch takes one of the two
        ({"bias_correction": False}, (None, None)),  # which torch's Adam does not take
    ],
)
def test_on_gpus_what_is_stated_of_an_adam_stays(params: dict[str, Any], expected: tuple[Any, Any]) -> None:
    assert of_adam(optimizer(lr=1, **params)) == expected


def test_no_timer_waits_for_a_gpu_unless_it_is_asked_for() -> None:
    path = ("timers", "throughput", "enabled")
    assert fill({}, accelerator=CUDA).get(path) is False
    assert fill({"timers": {}, "wall_clock_breakdown": True}, accelerator=CUDA).get(path) is False
    assert fill({}, accelerator=CPU).get(path) is None
    assert fill({"steps_per_print": 10}, accelerator=CUDA).get(path) is None
    assert fill({"timers": {"throughput": {"enabled": True}}}, accelerator=CUDA).get(path) is True
    assert fill({"timers": {"throughput": {"synchronized": False}}}, accelerator=CUDA).get(path) is None


@pytest.mark.parametrize("device", ["cpu", "nvme"])
def test_an_offloaded_adam_stays_deepspeeds(device: str) -> None:
    offload = {"stage": 3, "offload_optimizer": {"device": device, "nvme_path": "/nvme"}}
    assert of_adam({**optimizer(lr=1), "zero_optimization": offload}) == (None, None)
    assert of_adam(optimizer("Lamb", lr=1)) == (None, None)


@pytest.mark.parametrize(
    ("hp", "said"),
    [
        ("learning_rate: '0.001'", "remove the quotes: 0.001"),
        ("learning_rate: fast", "write a number"),
        ("learning_rate: true", "write a number"),
        ("learning_rate: {a: 1}", "write a number"),
        ("learning_rate: 1\nmax_grad_norm: a", "write a number"),
        ("learning_rate: 1\nbetas: a", "[0.9, 0.999]"),
        ("learning_rate: 1\nadam_beta1: a\nadam_beta2: 1", "[0.9, 0.999]"),
    ],
)
def test_a_hyperparameter_that_does_not_fit_is_told_with_its_line(hp: str, said: str) -> None:
    problem = refusal(lambda: decide(f"{hp}\nglobal_batch_size: 8", optimizer(lr=AUTO)))
    assert problem.code == "wrong-type"
    assert said in problem.fix
    assert f"hp.yaml:{max(1, hp.count(chr(10)) - ('adam_beta' in hp) + 1)}" in problem.origin


LEAVES = st.sampled_from([AUTO, 1, 0.5, "x", True, [1], [AUTO]])
TREES = st.dictionaries(
    st.sampled_from(
        ["optimizer", "scheduler", "bf16", "fp16", "params", "lr", "betas", "enabled", "pin_memory"]
    ),
    st.recursive(
        LEAVES, lambda inner: st.dictionaries(st.sampled_from(["params", "lr", "enabled", "a"]), inner)
    ),
    max_size=4,
)


def autos(data: Any) -> int:
    if isinstance(data, (dict, list)):
        return sum(map(autos, data.values() if isinstance(data, dict) else data))
    return data == AUTO


@given(TREES)
def test_no_auto_is_left(data: dict[str, Any]) -> None:
    """Or it is told."""
    from determined_ds.errors import ConfigError

    try:
        filled = fill(data, {"learning_rate": 0.1})
    except ConfigError:
        assert autos(data)
        return
    assert autos(filled.data) == 0
