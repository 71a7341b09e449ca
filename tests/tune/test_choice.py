"""A choice laid over an experiment: how it is carried out changes, what is trained does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.check.one_experiment import CheckOptions, check_experiment
from determined_ds.check.output import ERROR
from determined_ds.config.accelerator import Accelerator
from determined_ds.config.strategy import Strategy
from determined_ds.documents.document import plain_copy
from determined_ds.documents.reading import dump_yaml, parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.pipe.orders import SCHEDULES
from determined_ds.tune.choice import BATCH_KEYS, OFFLOADS, ZEROPP, Base, Choice, applied, read_base
from determined_ds.tune.variants import Variant, decided, named_variants
from tests.tune.bases import CONST, CPU, CUDA, ROOT, TEMPLATES, base_in, base_of, document_of

PIPELINE = Path("experiments/gpt2/pipeline.yaml")
ZEROPP_TEMPLATE = Path("experiments/gpt2/zeropp.yaml")
CHOSEN = ("deepspeed_config", "overwrite_deepspeed_args", "data_parallel_world_size", "pipe_parallel_size")
SCHEDULE = ("pipe_schedule", "pipe_chunks")
CHOSEN_JSON = (*BATCH_KEYS, "zero_optimization", "bf16", "fp16")

choices = st.builds(
    Choice,
    zero_stage=st.integers(0, 3),
    pipe_parallel_size=st.sampled_from([1, 1, 2, 4]),
    pipe_schedule=st.sampled_from([None, *SCHEDULES]),
    slots=st.sampled_from([1, 2, 4, 8]),
    micro_batch_size=st.sampled_from([None, 1, 2, 3, 4, 8, 16]),
    offload_optimizer=st.booleans(),
    offload_param=st.booleans(),
    zeropp=st.booleans(),
    precision=st.sampled_from([None, "fp32", "bf16", "fp16"]),
    activation_checkpointing=st.sampled_from([None, True, False]),
    bucket_size=st.sampled_from([None, 5_000_000]),
    torch_compile=st.sampled_from([None, True]),
    fused_optimizer=st.sampled_from([None, True, False]),
    sdpa_kernel=st.sampled_from([None, "math", "auto"]),
)
templates = st.sampled_from(TEMPLATES)


@pytest.mark.parametrize("config", [CONST, Path("experiments/gpt2/search.yaml")], ids=lambda path: path.stem)
def test_a_value_by_another_name_gives_way_to_the_choice(config: Path) -> None:
    by_others = {"pp_size": 1, "gradient_accumulation_steps": 2, "use_bf16": "false", "micro_batch_size": 8}
    words = [f"hyperparameters.{name}={value}" for name, value in by_others.items()]
    base = base_of(config, *words, accelerator=CUDA)
    assert base.resolved.batch.accumulation == 2
    chosen = decided(base, "x", Choice(zero_stage=2, slots=2, micro_batch_size=4, precision="bf16"))
    assert chosen.problems == ()
    assert chosen.resolved is not None
    assert (chosen.resolved.batch.micro_batch_size, chosen.resolved.batch.accumulation) == (4, 4)
    assert chosen.resolved.ds_config["bf16"]["enabled"] is True


def has_form(base: Base, choice: Choice) -> bool:
    return base.has_form(choice.pipe_parallel_size)


def rest_of(base: Base, data: dict[str, Any]) -> dict[str, Any]:
    """An experiment without what a choice may change."""
    data = plain_copy(data)
    data.pop("entrypoint")
    data["resources"].pop("slots_per_trial")
    for key in (*CHOSEN, *SCHEDULE, "torch_compile", "sdpa_kernel", base.checkpointing_key):
        data["hyperparameters"].pop(key, None)
    return data


def rest_of_json(ds: dict[str, Any]) -> dict[str, Any]:
    """A DeepSpeed JSON without what a choice may change."""
    ds = plain_copy({key: value for key, value in ds.items() if key not in CHOSEN_JSON})
    for key in ("torch_adam", "fused"):
        ds.get("optimizer", {}).get("params", {}).pop(key, None)
    return ds


def json_in(data: dict[str, Any]) -> dict[str, Any]:
    ds: dict[str, Any] = data["hyperparameters"]["deepspeed_config"]["val"]
    return ds


def decided_json(variant: Variant) -> dict[str, Any]:
    assert variant.resolved is not None, variant.reason
    return variant.resolved.ds_config


# ------------------------------------------------------------------------------------------- what stays


@given(templates, choices)
def test_the_rest_of_the_experiment_stays(config: Path, choice: Choice) -> None:
    """Model, data, seed, length and searcher; optimizer, scheduler and clipping, to the letter."""
    base = base_of(config, accelerator=CUDA)
    if not has_form(base, choice):
        return
    data = applied(base, choice).data
    assert rest_of(base, data) == rest_of(base, base.document.data)
    assert rest_of_json(json_in(data)) == rest_of_json(base.ds)


@given(templates, choices)
def test_the_batch_and_what_steps_with_it_stay_as_decided(config: Path, choice: Choice) -> None:
    base = base_of(config, accelerator=CUDA)
    variant = decided(base, "", choice)
    if variant.resolved is None:
        assert variant.problems
        return
    assert variant.experiment is not None
    before, after = base.resolved, variant.resolved
    assert after.batch.global_batch_size == before.batch.global_batch_size
    assert after.batch.micro_batch_size * after.batch.accumulation * after.batch.replicas == (
        before.batch.global_batch_size
    )
    assert after.topology.slots == choice.slots
    assert after.fit == before.fit
    assert variant.experiment.seed == base.experiment.seed
    for key in ("optimizer", "scheduler", "gradient_clipping"):
        assert rest_of_json(after.ds_config).get(key) == rest_of_json(before.ds_config).get(key)


@given(templates, choices)
def test_what_can_run_passes_det_ds_check(config: Path, choice: Choice) -> None:
    """And it is what it was when it is written to a file and read again."""
    variant = decided(base_of(config, accelerator=CUDA), "", choice)
    if variant.document is None:
        return
    document = parse_yaml(dump_yaml(variant.document.data), "tuned.yaml")
    assert document.data == variant.document.data
    checked = check_experiment(document, CheckOptions(context_dir=ROOT, accelerator="cuda"))
    assert [str(each.problem) for each in checked.findings if each.severity == ERROR] == []
    assert checked.num_runnable == 1


@pytest.mark.parametrize("accelerator", [CPU, CUDA], ids=["cpu", "cuda"])
@pytest.mark.parametrize("config", TEMPLATES, ids=str)
def test_the_experiment_as_it_is_is_a_choice(config: Path, accelerator: Accelerator) -> None:
    """Laid over itself it runs just as it did: so a tuning's first measurement is of the experiment."""
    if config == ZEROPP_TEMPLATE and accelerator is CPU:
        return  # which cannot run
    base = base_of(config, accelerator=accelerator)
    again = decided(base, "as it is", base.own)
    assert decided_json(again) == base.resolved.ds_config
    assert again.resolved is not None
    assert again.resolved.topology == base.resolved.topology
    assert again.experiment is not None
    assert again.experiment.trial == base.experiment.trial


# ------------------------------------------------------------------------------------------ what changes


@given(templates, choices)
def test_the_zero_section_holds_what_was_chosen_and_no_more(config: Path, choice: Choice) -> None:
    base = base_of(config, accelerator=CUDA)
    if not has_form(base, choice):
        return
    zero = json_in(applied(base, choice).data)["zero_optimization"]
    assert zero["stage"] == choice.zero_stage
    assert (OFFLOADS[0] in zero) == choice.offload_optimizer
    assert (OFFLOADS[1] in zero) == choice.offload_param
    assert any(key in zero for key in ZEROPP) == choice.zeropp
    if choice.zero_stage < 3 and not choice.zeropp:
        assert not [key for key in zero if key.startswith(("stage3_", "zero_"))]
    if choice.bucket_size is not None:
        assert zero["reduce_bucket_size"] == zero["allgather_bucket_size"] == choice.bucket_size


def test_zero_pp_of_the_experiment_is_part_of_what_it_is() -> None:
    """So ``zero3`` beside ``zeropp`` is ZeRO 3 without it, whichever of them the experiment has."""
    base = base_of(ZEROPP_TEMPLATE, accelerator=CUDA)
    assert base.own.zeropp
    plain = applied(base, replace(base.own, zeropp=False)).data
    own = applied(base, base.own).data
    assert not json_in(plain)["zero_optimization"].keys() & set(ZEROPP)
    assert json_in(own)["zero_optimization"] == base.ds["zero_optimization"]
    on_four = json_in(applied(base, replace(base.own, slots=4)).data)["zero_optimization"]
    assert [on_four[key] for key in ZEROPP] == [4, True, True]


def test_offload_keeps_what_the_experiment_says_of_it() -> None:
    base = base_of(Path("experiments/gpt2/zero3_offload.yaml"), accelerator=CUDA)
    assert (base.own.offload_optimizer, base.own.offload_param) == (True, True)
    zero = json_in(applied(base, base.own).data)["zero_optimization"]
    assert zero["offload_optimizer"] == base.ds["zero_optimization"]["offload_optimizer"]
    assert zero["offload_param"] == base.ds["zero_optimization"]["offload_param"]


def test_precision_is_one_of_three() -> None:
    base = base_of(CONST, "hyperparameters.overwrite_deepspeed_args.fp16.loss_scale=128", accelerator=CUDA)
    for precision in ("fp32", "bf16", "fp16"):
        ds = decided_json(decided(base, "", replace(base.own, precision=precision)))
        assert ds.get("bf16", {}).get("enabled", False) == (precision == "bf16")
        assert ds.get("fp16", {}).get("enabled", False) == (precision == "fp16")
        assert ds["fp16"]["loss_scale"] == 128


def test_a_fused_optimizer_is_torchs() -> None:
    base = base_of()
    params = json_in(applied(base, replace(base.own, fused_optimizer=True)).data)["optimizer"]["params"]
    assert {key: params[key] for key in ("torch_adam", "fused")} == {"torch_adam": True, "fused": True}
    plain = json_in(applied(base, replace(base.own, fused_optimizer=False)).data)["optimizer"]["params"]
    assert plain["torch_adam"]
    assert "fused" not in plain


def test_what_a_model_reads_is_told_it_by_its_own_name() -> None:
    base = base_of(Path("experiments/causal_lm/const.yaml"))
    choice = replace(base.own, activation_checkpointing=True, sdpa_kernel="math", torch_compile=True)
    hparams = applied(base, choice).data["hyperparameters"]
    assert hparams["activation_checkpointing"] is True
    assert hparams["sdpa_kernel"] == "math"
    assert hparams["torch_compile"] is True


# ------------------------------------------------------------------------------------ by the names of today


def base_with(folder: Path, json: str) -> Base:
    """An experiment by old names, which DeepSpeed still reads."""
    (folder / "trial.py").write_text(TRIALS.format(replicated="Mine", staged="Other"))
    text = EXPERIMENT.format(entrypoint=f"{LAUNCH} trial:Mine").replace("optimizer:", f"{json}, optimizer:")
    return base_in(folder, text, CUDA)


def strategy_in(variant: Variant) -> Strategy:
    assert variant.resolved is not None, variant.reason
    return variant.resolved.strategy


def test_fp32_is_fp32_whatever_bf16_is_called(tmp_path: Path) -> None:
    """``bfloat16``, the old name, left the tuner's reference in bf16."""
    base = base_with(tmp_path, "bfloat16: {enabled: true}")
    assert strategy_in(decided(base, "as it is", base.own)).precision == "bf16"
    assert strategy_in(decided(base, "reference", replace(base.own, precision="fp32"))).precision == "fp32"


@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_what_is_not_to_be_offloaded_is_not_whatever_that_is_called(zero_stage: int, tmp_path: Path) -> None:
    """``cpu_offload``, the old name, stayed in the strategies that offload nothing."""
    base = base_with(tmp_path, "zero_optimization: {stage: 2, cpu_offload: true}")
    assert base.own.offload_optimizer
    plain, offloaded = named_variants(base, [f"zero{zero_stage}", "zero2_offload"], [2])
    assert not strategy_in(plain).offload_optimizer
    assert strategy_in(offloaded).offload_optimizer


# ------------------------------------------------------------------------------------------ its two forms


def test_the_form_with_stages_stands_in_the_same_module() -> None:
    for config in (CONST, PIPELINE):
        base = base_of(config)
        assert base.replicated == "model_defs.gpt2.trial:GPT2Trial"
        assert base.staged == "model_defs.gpt2.trial:GPT2PipelineTrial"


def test_a_pipeline_becomes_replicas_and_a_pipeline_again() -> None:
    base = base_of(PIPELINE)
    flat = replace(base.own, pipe_parallel_size=1, micro_batch_size=16)
    replicas = decided(base, "replicas", flat)
    assert replicas.experiment is not None
    assert replicas.experiment.trial == base.replicated
    assert replicas.resolved is not None
    assert replicas.resolved.topology.data_parallel_world_size == 2
    assert replicas.document is not None
    again = decided(read_base(replicas.document, ROOT, CPU), "again", base.own)
    assert again.experiment is not None
    assert again.experiment.trial == base.experiment.trial
    assert decided_json(again) == base.resolved.ds_config


TRIALS = """
from determined_ds import DataParallelTrial, PipelineTrial
class {replicated}(DataParallelTrial): ...
class {staged}(PipelineTrial): ...
class OtherReplicas(DataParallelTrial): ...
class OtherStages(PipelineTrial): ...
class _Hidden(PipelineTrial): ...
"""
EXPERIMENT = """
name: own
entrypoint: {entrypoint}
resources: {{slots_per_trial: 2}}
hyperparameters:
  global_batch_size: 8
  deepspeed_config: {{type: const, val: {{optimizer: {{type: Adam, params: {{lr: 0.1}}}}}}}}
  fit: {{max_length: {{batches: 4}}}}
searcher: {{name: single, metric: validation_loss}}
"""
LAUNCH = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train"


def test_of_several_sisters_the_one_with_the_likest_name(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(TRIALS.format(replicated="MineFlat", staged="MinePiped"))
    base = base_in(tmp_path, EXPERIMENT.format(entrypoint=f"{LAUNCH} trial:MineFlat"))
    assert (base.replicated, base.staged) == ("trial:MineFlat", "trial:MinePiped")
    base = base_in(tmp_path, EXPERIMENT.format(entrypoint=f"{LAUNCH} trial:OtherStages"))
    assert (base.replicated, base.staged) == ("trial:OtherReplicas", "trial:OtherStages")


def test_an_entrypoint_of_words_stays_one(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(TRIALS.format(replicated="MineFlat", staged="MinePiped"))
    words = [*LAUNCH.split(), "trial:MineFlat"]
    base = base_in(tmp_path, EXPERIMENT.format(entrypoint=words))
    piped = applied(base, Choice(zero_stage=0, slots=2, pipe_parallel_size=2)).data["entrypoint"]
    assert piped == [*LAUNCH.split(), "trial:MinePiped"]


def test_a_form_that_there_is_none_of_is_refused(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(
        "from determined_ds import DataParallelTrial\nclass Mine(DataParallelTrial): ...\n"
    )
    base = base_in(tmp_path, EXPERIMENT.format(entrypoint=f"{LAUNCH} trial:Mine"))
    with pytest.raises(ConfigError) as caught:
        applied(base, Choice(zero_stage=0, slots=2, pipe_parallel_size=2))
    [problem] = caught.value.problems
    assert problem.key == "entrypoint"
    assert problem.message == "Mine has no stages, and trial has no other that is a PipelineTrial"
    assert "write one beside Mine" in problem.fix


# ------------------------------------------------------------------------------------------ what is read


def test_of_a_search_one_point_is_taken() -> None:
    """The one in the middle, which ``det-ds run`` trains too; nothing of it is searched any more."""
    config = Path("experiments/gpt2/search.yaml")
    document = document_of(config)
    base = read_base(document, ROOT, CPU)
    assert not base.experiment.searched
    assert base.document.data["searcher"]["name"] == "single"
    assert base.document.data["searcher"]["metric"] == document.data["searcher"]["metric"]
    assert base.resolved.batch.global_batch_size == document.data["hyperparameters"]["global_batch_size"]


def test_an_experiment_that_cannot_run_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        base_of(CONST, "hyperparameters.global_batch_size=31")
    assert "31" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        base_of(ZEROPP_TEMPLATE)
    assert "there is no CUDA device" in str(caught.value)
