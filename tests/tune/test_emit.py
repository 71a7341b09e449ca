"""The same tuning for a cluster: an ordinary search over the same choices, whose trials measure themselves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from determined_ds.check.one_experiment import CheckOptions, check_experiment
from determined_ds.check.output import ERROR
from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.decide import decide
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.experiment.space.points import points_of
from determined_ds.tune.axes import AXES
from determined_ds.tune.candidates import Candidates, candidates_of
from determined_ds.tune.choice import Base, read_base
from determined_ds.tune.emit import DEFAULT_BUCKET, LARGEST_GRID, emitted, stated
from determined_ds.tune.selection import METRICS
from tests.tune.bases import (
    CONST,
    CPU,
    CUDA,
    OVER,
    PLENTY,
    ROOT,
    base_in,
    base_of,
    document_of,
    shape_of,
)
from tests.tune.test_choice import EXPERIMENT, LAUNCH, TRIALS

FORMS = ("zero_stage", "micro_batch", "pipeline")
CAUSAL_LM = Path("experiments/causal_lm/const.yaml")
PIPELINE = Path("experiments/gpt2/pipeline.yaml")
OFFLOADED = Path("experiments/gpt2/zero3_offload.yaml")
FP32 = "hyperparameters.overwrite_deepspeed_args.bf16.enabled=false"
# Experiment, overrides, what it computes on, what is searched over.
CASES: dict[str, tuple[Path, tuple[str, ...], Accelerator, Sequence[str]]] = {
    "const on a CPU": (CONST, (), CPU, FORMS),
    "const on GPUs": (CONST, (FP32,), CUDA, (*FORMS, "precision")),
    "stages and pipelines alone": (CONST, (), CPU, ("zero_stage", "pipeline")),
    "micro-batches alone": (CONST, (), CPU, ("micro_batch",)),
    "a pipeline": (PIPELINE, (), CPU, FORMS),
    "a pipeline and replicas": (PIPELINE, (), CPU, ("pipeline",)),
    "the orders of a pipeline": (
        PIPELINE,
        (),
        CPU,
        ("micro_batch", "pipe_schedule", "pipe_chunks", "partition_method"),
    ),
    "a search": (Path("experiments/gpt2/search.yaml"), (), CPU, FORMS),
    "buckets": (CONST, (), CPU, ("zero_stage", "buckets")),
    "buckets of its own": (
        CONST,
        ("hyperparameters.overwrite_deepspeed_args.zero_optimization.reduce_bucket_size=1000000",),
        CPU,
        ("zero_stage", "buckets"),
    ),
    "offload": (CONST, (), CUDA, ("zero_stage", "offload")),
    "offloaded": (OFFLOADED, (), CUDA, ("zero_stage", "offload")),
    "offloaded, and stays so": (OFFLOADED, (), CUDA, ("zero_stage",)),
    "kernels": (CAUSAL_LM, (), CPU, ("compile", "fused_optimizer", "attention", "activation_checkpointing")),
    "kernels that were chosen before": (
        CAUSAL_LM,
        (
            "hyperparameters.torch_compile=true",
            "hyperparameters.sdpa_kernel=math",
            "hyperparameters.activation_checkpointing=true",
            "hyperparameters.overwrite_deepspeed_args.optimizer.params={torch_adam: true, fused: true}",
        ),
        CPU,
        ("compile", "fused_optimizer", "attention", "activation_checkpointing"),
    ),
}


def emit(base: Base, found: Candidates, metric: str = "samples_per_second", steps: int = 20) -> str:
    choices = [stated(candidate.variant) for candidate in found.possible]
    return emitted(
        base, choices, found.left, metric=metric, smaller_is_better=METRICS[metric], steps=steps, warmup=5
    )


def emitted_of(
    config: Path = CONST, over: Sequence[str] = FORMS, accelerator: Accelerator = CPU, **more: Any
) -> str:
    base = base_of(config, accelerator=accelerator)
    return emit(base, candidates_of(base, over, shape_of, PLENTY), **more)


def experiment_of(text: str) -> Experiment:
    return parse_experiment(parse_yaml(text, "tune.yaml"))


def resolved_points(experiment: Experiment, accelerator: Accelerator) -> list[ResolvedConfig | None]:
    """Every point as a trial would have it; None where it is refused."""
    found: list[ResolvedConfig | None] = []
    for point in points_of(experiment.space):
        try:
            where = Where(context_dir=ROOT, accelerator=accelerator)
            found.append(decide(experiment, experiment.at(point.hyperparameters), where))
        except ConfigError:
            found.append(None)
    return found


def how_it_runs(resolved: ResolvedConfig, hparams: dict[str, Any]) -> dict[str, Any]:
    """What a run depends on, of all that is searched over; what says nothing left out."""
    ds = resolved.ds_config
    zero, params = dict(ds["zero_optimization"]), dict(ds["optimizer"]["params"])
    for name in ("offload_optimizer", "offload_param"):
        if zero.get(name, {}).get("device") in (None, "none"):
            zero.pop(name, None)
    params.setdefault("fused", False)
    zero.setdefault("reduce_bucket_size", DEFAULT_BUCKET)
    zero.pop("allgather_bucket_size", None)  # of which a search knows nothing: it goes with the other here
    if resolved.zero_stage < 3:
        zero = {key: value for key, value in zero.items() if not key.startswith("stage3_")}
    ds["zero_optimization"], ds["optimizer"] = zero, {**ds["optimizer"], "params": params}
    for name in ("bf16", "fp16"):
        if not ds.get(name, {}).get("enabled"):
            ds.pop(name, None)
    model = {key: hparams.get(key) or None for key in ("activation_checkpointing", "attn_implementation")}
    own = {
        "compiled": resolved.torch_compile,
        "kernel": resolved.sdpa_kernel,
        "order": resolved.strategy.pipeline,
    }
    own["partition"] = resolved.strategy.partition_method
    return {"ds": ds, "topology": str(resolved.topology), **own, **model}


# ------------------------------------------------------------------------------------------- the same choices


@pytest.mark.parametrize("case", CASES)
def test_every_candidate_is_a_point_of_it(case: str) -> None:
    """With the same settings to the letter, as DeepSpeed would be given them."""
    config, overrides, accelerator, over = CASES[case]
    base = read_base(document_of(config, *overrides), ROOT, accelerator)
    found = candidates_of(base, over, shape_of, PLENTY)
    assert len(found.possible) > 1
    experiment = experiment_of(emit(base, found))
    points = points_of(experiment.space)
    assert points.exact
    runs = [
        how_it_runs(resolved, point.hyperparameters)
        for point, resolved in zip(points, resolved_points(experiment, accelerator), strict=True)
        if resolved is not None
    ]
    for candidate in found.possible:
        variant = candidate.variant
        assert variant.resolved is not None
        assert variant.experiment is not None
        assert how_it_runs(variant.resolved, variant.experiment.hyperparameters.data) in runs, candidate.name


def test_impossible_points_are_refused_and_no_others() -> None:
    """Of 40: ZeRO 2 and 3 with a pipeline. ZeRO 1 with one replica of a pipeline can run, though nobody would."""
    experiment = experiment_of(emitted_of())
    refused, ran = [], []
    for point, resolved in zip(points_of(experiment.space), resolved_points(experiment, CPU), strict=True):
        settings = (point.hyperparameters["zero_stage"], point.hyperparameters["pipe_parallel_size"])
        (refused if resolved is None else ran).append(settings)
    assert len(refused) + len(ran) == 4 * 5 * 2
    assert set(refused) == {(2, 2), (3, 2)}
    assert len(refused) == 2 * 5
    assert set(ran) == {(0, 1), (1, 1), (2, 1), (3, 1), (0, 2), (1, 2)}


@pytest.mark.parametrize("case", CASES)
def test_it_passes_det_ds_check(case: str) -> None:
    """Of an impossible point there is a warning, since the searcher drops it."""
    config, overrides, accelerator, over = CASES[case]
    base = read_base(document_of(config, *overrides), ROOT, accelerator)
    document = parse_yaml(emit(base, candidates_of(base, over, shape_of, PLENTY)), "tune.yaml")
    checked = check_experiment(document, CheckOptions(context_dir=ROOT, accelerator=accelerator.name))
    assert [str(each.problem) for each in checked.findings if each.severity == ERROR] == []
    for finding in checked.findings:
        if finding.problem.code == "search-order":  # over a hundred points: which of them, no one counts on
            assert document.get(("searcher", "name")) == "adaptive_asha"
            continue
        assert finding.share is not None, finding.problem
    assert checked.num_runnable >= 2


def test_with_gpus_or_without_what_was_left_out_is_said() -> None:
    assert "\n# Not searched: offload, since a CPU has no other memory to offload to.\n" in emitted_of(
        over=["offload", *FORMS]
    )
    on_gpus = emitted_of(over=["fused_optimizer", *FORMS], accelerator=CUDA)
    assert "\n# Not searched: fused_optimizer, since on GPUs the optimizer is fused already.\n" in on_gpus


def test_orders_are_searched_over_pipelines_alone() -> None:
    """Else every plan without stages would be measured once for each."""
    text = emitted_of(over=["pipe_schedule", "partition_method", *FORMS])
    assert (
        "# Not searched: pipe_schedule, since a search would measure what has no stages once for each" in text
    )
    assert "pipe_schedule" not in yaml.safe_load(text)["hyperparameters"]
    hparams = yaml.safe_load(emitted_of(PIPELINE, over=["pipe_schedule", "partition_method"]))[
        "hyperparameters"
    ]
    assert hparams["pipe_schedule"]["vals"] == ["auto", "interleaved", "zb-h1", "dualpipev"]
    assert hparams["partition_method"]["vals"] == ["auto", "measured"]


# --------------------------------------------------------------------------------------------- the experiment


def test_the_rest_of_the_experiment_stays() -> None:
    data, own = yaml.safe_load(emitted_of()), base_of().document.data
    for key in ("data", "resources", "reproducibility"):
        assert data[key] == own[key]
    for key in ("global_batch_size", "model_size", "sequence_length", "learning_rate", "warmup_num_steps"):
        assert data["hyperparameters"][key] == own["hyperparameters"][key]
    assert data["name"] == "gpt2_const_autotune"
    assert data["max_restarts"] == 0


@pytest.mark.parametrize("metric", METRICS)
def test_its_trials_measure_so_many_steps_and_report_the_metric(metric: str) -> None:
    text = emitted_of(metric=metric, steps=30)
    experiment = experiment_of(text)
    assert experiment.measures
    assert experiment.train_options == (
        *("--pipeline-trial", "model_defs.gpt2.trial:GPT2PipelineTrial"),
        *("--measure", "30", "--warmup", "5"),
    )
    assert experiment.trial == "model_defs.gpt2.trial:GPT2Trial"
    assert (experiment.metric, experiment.smaller_is_better) == (metric, METRICS[metric])
    assert experiment.config["hyperparameters"]["fit"] == {"max_length": {"batches": 35}}
    assert (
        f"40 points, each measured for 30\n# steps after 5. Points that cannot run are dropped. The metric is {metric}."
        in text
    )


def test_a_trial_without_stages_names_no_other() -> None:
    experiment = experiment_of(emitted_of(Path("experiments/bert/const.yaml")))
    assert experiment.train_options == ("--measure", "20", "--warmup", "5")


def test_the_words_of_an_entrypoint_stay_words(tmp_path: Path) -> None:
    (tmp_path / "trial.py").write_text(TRIALS.format(replicated="MineFlat", staged="MinePiped"))
    base = base_in(tmp_path, EXPERIMENT.format(entrypoint=[*LAUNCH.split(), "trial:MinePiped"]))
    data = yaml.safe_load(emit(base, candidates_of(base, FORMS, shape_of, PLENTY)))
    options = ["--pipeline-trial", "trial:MinePiped", "--measure", "20", "--warmup", "5"]
    assert data["entrypoint"] == [*LAUNCH.split(), "trial:MineFlat", *options]


# ------------------------------------------------------------------------------------------------ the searcher


def test_up_to_a_hundred_points_are_a_grid() -> None:
    data = yaml.safe_load(emitted_of())
    assert data["searcher"] == {"name": "grid", "metric": "samples_per_second", "smaller_is_better": False}


def test_more_are_an_adaptive_asha_that_judges_them_on_the_way() -> None:
    everything = [axis for axis in AXES if axis not in ("precision", "offload", "attention")]
    experiment = experiment_of(emitted_of(over=everything))
    size = experiment.space.size
    assert size is not None
    assert size > LARGEST_GRID
    searcher = experiment.config["searcher"]
    assert searcher["name"] == "adaptive_asha"
    assert searcher["max_trials"] == LARGEST_GRID
    assert (searcher["time_metric"], searcher["max_time"]) == ("batches", 25)
    assert experiment.config["hyperparameters"]["fit"] == {
        "max_length": {"batches": 25},
        "validation_period": {"batches": 6},
    }
    checked = check_experiment(
        parse_yaml(emitted_of(over=everything), "tune.yaml"),
        CheckOptions(context_dir=ROOT, accelerator="cpu"),
    )
    assert [str(each.problem) for each in checked.findings if each.severity == ERROR] == []


def test_a_trial_that_measures_itself_does_not_validate() -> None:
    """So a search that goes by the validation's metric is refused, with what it may go by."""
    text = emitted_of().replace("metric: samples_per_second", "metric: validation_loss")
    checked = check_experiment(
        parse_yaml(text, "tune.yaml"), CheckOptions(context_dir=ROOT, accelerator="cpu")
    )
    [problem] = [each.problem for each in checked.findings if each.severity == ERROR]
    assert (problem.key, problem.code) == ("searcher.metric", "metric")
    assert "samples_per_second, step_seconds, peak_memory_gib" in problem.message


def test_the_points_are_counted() -> None:
    base = base_of(CONST, FP32, accelerator=CUDA)
    text = emit(base, candidates_of(base, OVER, shape_of, PLENTY))
    size = experiment_of(text).space.size
    assert size == math.prod((4, 5, 2, 2)) == 80
    assert f"as a search on a cluster: {size} points" in text
