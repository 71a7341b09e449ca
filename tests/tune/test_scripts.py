"""An experiment that runs a script: its entrypoint stays, and what only a trial class can do is left out by name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from determined_ds.errors import ConfigError
from determined_ds.report.results import OUT_OF_MEMORY
from determined_ds.tune.axes import AXES, choices_of
from determined_ds.tune.candidates import Candidate, takes_as_much
from determined_ds.tune.choice import Base, Choice, applied
from determined_ds.tune.variants import Variant, decided, named_variants
from determined_ds.tune.workbench import Sizes
from tests.tune.bases import CPU, CUDA, base_in, base_of, gpt2_candidates, named
from tests.tune.simulated import Machine, tuned

HF_TRAINER = Path("experiments/hf_trainer/const.yaml")
EXPERIMENT = """
name: own
entrypoint: python3 -m determined.launch.torch_distributed python3 train.py --epochs 2
resources: {slots_per_trial: 2}
hyperparameters:
  global_batch_size: 8
  deepspeed_config: {type: const, val: {optimizer: {type: Adam, params: {lr: 0.1}}}}
searcher: {name: single, metric: loss}
"""
SESSION = "import determined_ds\nwith determined_ds.session() as s:\n    pass\n"


def own_base(folder: Path, script: str = SESSION, experiment: str = EXPERIMENT) -> Base:
    (folder / "train.py").write_text(script)
    return base_in(folder, experiment, CUDA)


def test_a_choice_changes_its_hyperparameters_and_not_its_entrypoint(tmp_path: Path) -> None:
    base = own_base(tmp_path)
    data = applied(base, Choice(zero_stage=2, slots=4, micro_batch_size=1)).data
    assert data["entrypoint"] == base.document.data["entrypoint"]
    assert data["resources"]["slots_per_trial"] == 4
    ds = data["hyperparameters"]["deepspeed_config"]["val"]
    assert ds["zero_optimization"]["stage"] == 2
    assert ds["train_micro_batch_size_per_gpu"] == 1


def test_every_strategy_without_stages_can_run_it(tmp_path: Path) -> None:
    names = ["zero0", "zero1", "zero2", "zero3", "zero3_offload", "zeropp", "single_gpu_simple"]
    for base in (own_base(tmp_path), base_of(HF_TRAINER, accelerator=CUDA)):
        assert [each.reason for each in named_variants(base, names, [2])] == [""] * len(names)


@pytest.mark.parametrize(
    ("name", "message", "fix"),
    [
        ("pipeline", "a script keeps the stages that its code builds, and this one has no pipeline", "leave"),
        ("ddp", "a script makes its engine itself, so it cannot be trained by ddp", "zero0"),
    ],
)
def test_what_only_a_trial_class_can_do_is_refused_by_name(
    name: str, message: str, fix: str, tmp_path: Path
) -> None:
    [variant] = named_variants(own_base(tmp_path), [name], [2])
    assert not variant.can_run
    [problem] = variant.problems
    assert problem.message.startswith(message)
    assert fix in problem.fix


def test_a_script_that_builds_a_pipeline_keeps_its_stages(tmp_path: Path) -> None:
    stages = EXPERIMENT.replace("hyperparameters:", "hyperparameters:\n  pipe_parallel_size: 2")
    base = own_base(tmp_path, experiment=stages)
    piped, flat = named_variants(base, ["pipeline", "zero1"], [2])
    assert piped.can_run
    assert "this one has 2 pipeline stages" in flat.reason
    depths = {choice.pipe_parallel_size for choice in choices_of(base, ["zero_stage", "pipeline"])[0]}
    assert depths == {2}


def test_what_the_code_decides_cannot_be_varied(tmp_path: Path) -> None:
    lines = EXPERIMENT.splitlines()
    open_ = "\n".join(line for line in lines if "global_batch_size" not in line and "deepspeed" not in line)
    with pytest.raises(ConfigError, match="the script decides batch and strategy") as caught:
        own_base(
            tmp_path, experiment=open_.replace("hyperparameters:", "hyperparameters: {learning_rate: 1}")
        )
    assert "state hyperparameters.deepspeed_config" in caught.value.problems[0].fix


# ------------------------------------------------------------------------------------ what its sources read


def test_an_axis_that_a_script_does_not_read_is_left_out(tmp_path: Path) -> None:
    """A value that nothing reads would be measured under the name of what it does not do."""
    _, left = choices_of(own_base(tmp_path), tuple(AXES))
    found = {each.axis for each in left}
    assert found >= {"pipeline", "activation_checkpointing", "compile", "attention", "precision"}


def test_what_the_library_reads_its_script_does_not() -> None:
    """In this checkout the library lies beside the script, and is imported by it."""
    _, left = choices_of(base_of(HF_TRAINER), tuple(AXES))
    assert {each.axis for each in left} >= {"pipeline", "activation_checkpointing", "attention"}
    assert "compile" not in {each.axis for each in left}  # its arguments take it


@pytest.mark.parametrize("place", ["train.py", "helper.py"])
def test_a_hyperparameter_that_it_reads_is_an_axis(place: str, tmp_path: Path) -> None:
    reads = 's.hparams["gradient_checkpointing"], s.hparams["torch_compile"]\n'
    (tmp_path / "helper.py").write_text(reads)
    base = own_base(tmp_path, SESSION + ("import helper\n" if place == "helper.py" else reads))
    assert base.checkpointing_key == "gradient_checkpointing"
    _, left = choices_of(base, ["activation_checkpointing", "compile"])
    assert left == []


@pytest.mark.parametrize("line", ["inputs = inputs.to(engine.device, torch.bfloat16)", "y = x.to(w.dtype)"])
def test_a_script_that_casts_its_inputs_may_be_in_bf16(line: str, tmp_path: Path) -> None:
    choices, left = choices_of(own_base(tmp_path, SESSION + line), ["precision"])
    assert left == []
    assert {choice.precision for choice in choices} == {None, "bf16"}


def test_the_jsons_optimizer_is_not_varied_where_the_script_has_its_own(tmp_path: Path) -> None:
    """DeepSpeed ignores it then."""
    (tmp_path / "train.py").write_text(SESSION + "deepspeed.initialize(model=a, optimizer=b)\n")
    _, left = choices_of(base_in(tmp_path, EXPERIMENT, CPU), ["fused_optimizer"])
    assert [each.reason for each in left] == ["the script makes its optimizer itself"]


@pytest.mark.parametrize(
    ("line", "takes"),
    [
        ("from determined_ds.transformers import DetCallback, TrainingArguments", True),
        ("from determined_ds.transformers import (\n    DetCallback,\n    ReconciledArguments,\n)", True),
        (
            "from determined_ds.transformers import DetCallback\nfrom transformers import TrainingArguments",
            False,
        ),
    ],
)
def test_arguments_of_transformers_take_torch_compile(line: str, takes: bool, tmp_path: Path) -> None:
    _, left = choices_of(own_base(tmp_path, f"{line}\n"), ["compile"])
    assert [each.axis for each in left] == ([] if takes else ["compile"])


# ------------------------------------------------------------------------------ a model of unknown sizes


def test_sizes_are_those_that_a_hyperparameter_describes_or_unknown(tmp_path: Path) -> None:
    base = base_of(HF_TRAINER)
    sizes = Sizes(base=base)
    shape = sizes(decided(base, "", base.own))
    assert shape is not None
    assert shape.num_layers == 4
    assert sizes.unknown == ""
    own = own_base(tmp_path)
    sizes = Sizes(base=own)
    assert sizes(decided(own, "", own.own)) is None
    assert "no hyperparameter describes it" in sizes.unknown


def without_sizes() -> tuple[Candidate, ...]:
    return tuple(replace(each, shape=None) for each in gpt2_candidates())


def test_without_sizes_the_best_is_found_too() -> None:
    """By measuring: on twenty machines that differ in every effect, twelve runs of fifty."""
    machines = [Machine(gpt2_candidates(), seed) for seed in range(20)]
    shares = [tuned(without_sizes(), machine, trials=12).share for machine in machines]
    assert sum(share >= 0.97 for share in shares) >= 0.8 * len(shares), sorted(shares)[:8]


def test_without_sizes_the_least_memory_is_sought_where_most_is_divided() -> None:
    machine = Machine(gpt2_candidates(), 0)
    tuned(without_sizes(), machine, trials=12, metric="peak_memory_gib")
    first = named(gpt2_candidates(), machine.measured[1]).variant.choice
    assert (first.zero_stage, first.micro_batch_size) == (3, 1)


def variant_of(**choice: object) -> Variant:
    base = base_of()
    return decided(base, "", replace(base.own, **choice))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("more", "is_as_much"),
    [
        ({"zero_stage": 1, "micro_batch_size": 16}, True),
        ({"zero_stage": 0, "micro_batch_size": 16}, True),
        ({"zero_stage": 2, "micro_batch_size": 16}, False),
        ({"zero_stage": 1, "micro_batch_size": 8}, False),
        ({"zero_stage": 0, "micro_batch_size": 8}, False),
        ({"zero_stage": 1, "micro_batch_size": 16, "torch_compile": True}, False),
    ],
    ids=str,
)
def test_without_sizes_only_what_is_surely_larger_takes_as_much(
    more: dict[str, object], is_as_much: bool
) -> None:
    base = base_of()
    own = variant_of(zero_stage=1, micro_batch_size=16)
    other = Candidate(base=base, variant=own, shape=None)
    assert takes_as_much(Candidate(base=base, variant=variant_of(**more), shape=None), other) is is_as_much


def test_what_ran_out_of_memory_is_not_tried_in_a_larger_form() -> None:
    machine = Machine(gpt2_candidates(), 3)
    machine.fails = lambda each: (
        (OUT_OF_MEMORY, "out of memory")
        if each.variant.choice.zero_stage == 0
        and each.variant.choice.pipe_parallel_size == 1
        and each.variant.choice.micro_batch_size is not None
        else None
    )
    found = tuned(without_sizes(), machine, trials=40).tuning
    failed = [each.candidate for each in found.found.values() if each.row.status == OUT_OF_MEMORY]
    later = [name for name in machine.measured if named(gpt2_candidates(), name) not in failed]
    assert failed
    assert later
    order = [named(without_sizes(), name) for name in dict.fromkeys(machine.measured)]
    for place, candidate in enumerate(order):
        before = [each for each in order[:place] if each in failed]
        assert not any(takes_as_much(candidate, each) for each in before)
