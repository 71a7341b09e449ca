"""What ``det-ds autotune`` makes of a tuning: its report, its winner, and why there is none."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.errors import ConfigError, Problem
from determined_ds.report.results import FAILED, STOPPED, Row, load_results
from determined_ds.tune.autotune import BEST, Autotune, parse_budget, prepare_autotune
from determined_ds.tune.candidates import Candidate
from determined_ds.tune.measurement import Watch
from determined_ds.tune.selection import Budget, Tuning
from determined_ds.tune.workbench import Request, Workbench
from tests.tune.bases import CONST, ROOT, base_of, gpt2_candidates, row_of
from tests.tune.simulated import START_S, WARMUP, Machine, prepared

OWN = "as it is (zero1 micro 16)"


def autotune(folder: Path, machine: Machine, **more: Any) -> Autotune:
    """A tuning of the template on a simulated machine, as the command has it."""
    told = prepared(gpt2_candidates(), machine, **{"trials": 8, **more})
    request = Request(config=CONST, context_dir=ROOT, steps=20, warmup=WARMUP)
    return Autotune(
        workbench=Workbench(request=request, base=base_of(), run_dir=folder),
        tuning=told.tuning,
        interrupts=told.interrupts,
        dropped={"a batch that does not divide": 3},
        left=(),
    )


def refused(step: Callable[[], Any]) -> Problem:
    with pytest.raises(ConfigError) as caught:
        step()
    [problem] = caught.value.problems
    assert problem.fix
    return problem


def given_to(**more: Any) -> Autotune:
    """As ``det-ds autotune experiments/gpt2/const.yaml .`` would be prepared."""
    options = {"metric": "samples_per_second", "budget": "12", "over": ["zero_stage"], "tolerance": 0.02}
    options |= {name: more.pop(name) for name in (*options, "for_cluster") if name in more}
    shared: dict[str, Any] = {"steps": 20, "warmup": 5, "accelerator": "cpu", **more}
    return prepare_autotune(Request(config=ROOT / CONST, context_dir=ROOT, **shared), **options)


# ------------------------------------------------------------------------------------------------- its end


def test_it_writes_the_report_and_the_winner(tmp_path: Path) -> None:
    """In the report the experiment as it was comes first, which the others are held against."""
    machine = Machine(gpt2_candidates(), 0)
    tuning = autotune(tmp_path, machine)
    best = tuning.run()
    assert best is not None
    written = {path.name for path in tmp_path.iterdir()} - {".lock"}
    assert written == {BEST, "report.html", "results.json", "results.csv"}
    results = load_results(tmp_path / "results.json")
    assert results.rows[0].name == OWN
    assert {row.name for row in results.rows} == set(machine.measured)
    document = best.candidate.variant.document
    assert document is not None
    assert yaml.safe_load((tmp_path / BEST).read_text()) == document.data


def test_after_every_run_there_is_something_to_read(tmp_path: Path) -> None:
    machine = Machine(gpt2_candidates(), 0)
    tuning = autotune(tmp_path, machine)
    rows = []

    def measure(candidate: Candidate, repetition: int, watch: Watch) -> Row:
        there = (tmp_path / "results.json").exists()
        rows.append(len(load_results(tmp_path / "results.json").rows) if there else 0)
        return machine(candidate, repetition, watch)

    tuning.tuning.measure = measure
    tuning.run()
    assert rows[:5] == [0, 1, 2, 3, 4]


def test_interrupted_it_writes_what_was_found(tmp_path: Path) -> None:
    machine = Machine(gpt2_candidates(), 0)
    tuning = autotune(tmp_path, machine)
    interrupted_at(tuning, machine, 3)
    best = tuning.run()
    assert best is not None
    assert (tmp_path / BEST).exists()
    assert len(load_results(tmp_path / "results.json").rows) == 2


def test_interrupted_before_anything_was_measured_there_is_none(tmp_path: Path) -> None:
    machine = Machine(gpt2_candidates(), 0)
    tuning = autotune(tmp_path, machine)
    interrupted_at(tuning, machine, 1)
    assert tuning.run() is None
    assert os.listdir(tmp_path) == [".lock"]


def interrupted_at(tuning: Autotune, machine: Machine, number: int) -> None:
    """Have the n-th run interrupted."""

    def measure(candidate: Candidate, repetition: int, watch: Watch) -> Row:
        row = machine(candidate, repetition, watch)
        if len(machine.measured) < number:
            return row
        tuning.interrupts.signals.append(2)
        return row_of(candidate.variant, (), status=STOPPED, reason="interrupted")

    tuning.tuning.measure = measure


# --------------------------------------------------------------------------------------- why there is none


def test_an_experiment_that_crashes_ends_it_with_its_own_words(tmp_path: Path) -> None:
    machine = Machine(gpt2_candidates(), 0)
    machine.fails = lambda each: (FAILED, "ValueError: no such file") if each.name == OWN else None
    problem = refused(autotune(tmp_path, machine).run)
    assert problem.message == "the experiment as it is does not run: ValueError: no such file"
    assert str(tmp_path / "runs") in problem.fix
    assert "det-ds run" in problem.fix
    assert load_results(tmp_path / "results.json").rows[0].status == FAILED


def test_too_little_time_for_one_run(tmp_path: Path) -> None:
    machine = Machine(gpt2_candidates(), 0)
    problem = refused(autotune(tmp_path, machine, trials=10**6, seconds=START_S + machine.seconds[OWN]).run)
    assert (problem.key, problem.message) == ("--budget", "ended before the first measurement")
    assert "--budget 10m" in problem.fix


def test_nothing_that_trains_as_it_should(tmp_path: Path) -> None:
    """The experiment's own loss is not that of fp32, nor is any other's."""
    candidates = gpt2_candidates()
    reference = replace(candidates[1], variant=replace(candidates[1].variant, name="in fp32, for its loss"))
    machine = Machine([*candidates, reference], 0)
    machine.losses[reference.name] = 1.0
    problem = refused(autotune(tmp_path, machine, reference=reference).run)
    assert problem.key == "--loss-tolerance"
    assert "of the experiment as it is, its loss is 2 after 25 steps, and 1 in fp32" in problem.message


# ------------------------------------------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("text", "budget"),
    [
        ("12", Budget(trials=12)),
        ("12 trials", Budget(trials=12)),
        ("2trials", Budget(trials=2)),
        ("20m", Budget(seconds=1200)),
        (" 1.5 h ", Budget(seconds=5400)),
        ("90s", Budget(seconds=90)),
        ("30 s", Budget(seconds=30)),
    ],
)
def test_a_budget_is_a_time_or_a_number_of_runs(text: str, budget: Budget) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["1", "0", "1 trial", "2.5", "0.5 trials"])
def test_one_run_is_too_few(text: str) -> None:
    problem = refused(lambda: parse_budget(text))
    assert (problem.key, problem.value) == ("--budget", text)
    assert problem.message.startswith("is too small: ")


@pytest.mark.parametrize("text", ["0s", "29s", "0.4m", "0h"])
def test_and_seconds_are_too_short(text: str) -> None:
    problem = refused(lambda: parse_budget(text))
    assert "must be 30 s or more" in problem.message


@pytest.mark.parametrize("text", ["", "twenty", "20 minutes", "-5", "5d", "1e3", "20m 30s", "nan"])
def test_anything_else_is_neither(text: str) -> None:
    assert refused(lambda: parse_budget(text)).message == "must be a time or a number of trials"


@given(st.text())
def test_whatever_is_typed_is_a_budget_or_refused(text: str) -> None:
    try:
        budget = parse_budget(text)
    except ConfigError:
        return
    assert budget.trials >= 2
    assert budget.seconds >= 30


# ---------------------------------------------------------------------------------------- what it is given


def test_everything_that_is_wrong_is_said_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        given_to(metric="sample_per_second", budget="soon", over=["zero_stages"], overrides=["nonsense"])
    keys = [problem.key for problem in caught.value.problems]
    assert keys == ["--over", "--metric", "--budget", "--set nonsense"]
    fixes = [problem.fix for problem in caught.value.problems]
    assert fixes[0].startswith("did you mean zero_stage? ")
    assert fixes[1].startswith("did you mean samples_per_second? ")


def test_a_metric_of_the_model_is_none_of_a_tuning() -> None:
    problem = refused(lambda: given_to(metric="validation_loss"))
    assert "samples_per_second, tokens_per_second, step_seconds, peak_memory_gib" in problem.fix


def test_where_there_is_nothing_to_choose_from_it_says_why() -> None:
    problem = refused(
        lambda: given_to(over=["pipeline", "offload"], overrides=["resources.slots_per_trial=1"])
    )
    assert problem.key == "--over"
    assert "pipeline: a pipeline needs two slots or more" in problem.message
    assert "offload: a CPU has no other memory to offload to" in problem.message
    assert problem.fix.startswith("search over more: zero_stage, micro_batch, ")


def test_a_run_dir_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("")
    problem = refused(lambda: given_to(run_dir=tmp_path / "there"))
    assert problem.key == "--run-dir"


def test_for_a_cluster_there_are_gpus_unless_cpus_are_meant(tmp_path: Path) -> None:
    """And nothing is known of their memory."""
    here = given_to(run_dir=tmp_path)
    there = given_to(run_dir=tmp_path, for_cluster=True, accelerator=None)
    on_cpus = given_to(run_dir=tmp_path, for_cluster=True, accelerator="cpu")
    assert [each.workbench.base.accelerator.name for each in (here, there, on_cpus)] == ["cpu", "cuda", "cpu"]
    assert there.tuning.candidates[0].base.accelerator.num_devices == 2
    assert there.dropped == {}


def test_the_header_says_what_there_is_to_choose_from(tmp_path: Path) -> None:
    lines = given_to(run_dir=tmp_path, over=["zero_stage", "offload"]).header()
    assert lines[0] == "gpt2_const: 4 ways to train it on 2 slots, global batch 32"
    assert lines[1].endswith(str(tmp_path))
    assert "  left out offload: a CPU has no other memory to offload to" in lines
    assert isinstance(given_to(run_dir=tmp_path).tuning, Tuning)
