"""Points judged together get the verdicts that each would get alone."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.check.space.judging import ReadRecorder, judge_points
from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.config.resolve import Where, resolve
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import on_slots_of, resolve_stated
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.space.points import Point, points_of
from tests.experiment.space.test_points import experiment
from tests.making import CPU, CUDA


def choice(*values: Any) -> dict[str, Any]:
    return {"type": "categorical", "vals": list(values)}


DS: dict[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto"}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 5e8},
    "bf16": {"enabled": "auto"},
}
JSONS = {
    "plain.json": DS,
    "wrong.json": {**DS, "zero_optimization": {"stage": 7}, "optimiser": {}},
    "schedule.json": {**DS, "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}},
}


@pytest.fixture(scope="module", autouse=True)
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The folder with the DeepSpeed JSONs is the current one."""
    folder = tmp_path_factory.mktemp("jsons")
    for name, data in JSONS.items():
        (folder / name).write_text(json.dumps(data))
    with contextlib.chdir(folder):
        yield


def where(accelerator: Accelerator = CUDA, **stated: Any) -> Where:
    return Where(context_dir=Path(), accelerator=accelerator, **stated)


def alone(read: Experiment, point: Point, check: Any = None) -> tuple[list[str], list[str]]:
    """What is told of a point that is judged by itself, out of mappings that nobody else has."""
    document = read.at(copy.deepcopy(point.hyperparameters))
    resolved: ResolvedConfig | None = None
    problems: list[Problem] = []
    warnings: tuple[Problem, ...] = ()
    try:
        resolved = resolve(document, on_slots_of(read, where()))
        warnings = resolved.warnings
    except ConfigError as error:
        problems += error.problems
        warnings = error.warnings
    if check:
        problems += check(document, resolved)
    assert resolved or problems
    return [str(problem) for problem in problems], [str(problem) for problem in warnings]


VALUES: dict[str, list[Any]] = {
    "global_batch_size": [8, 9, "8", True, None, "auto"],
    "pipe_parallel_size": [1, 2, 1.0],
    "learning_rate": [0.1, "0.1", 1],
    "betas": [[0.9, 0.95], None, 1],
    "adam_beta1": [0.8, None],
    "adam_beta2": [0.9, "x"],
    "warmup_num_steps": [5, None],
    "max_grad_norm": [1.0, None, "x"],
    "dropout": [0.1, 0.2],
    "fit": [{"max_length": {"batches": 3}}, {"max_lenght": 1}, None],
    "overwrite_deepspeed_args": [
        {"zero_optimization": {"stage": 2}},
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}},
        {"optimizer": {"params": {"lr": 0.5}}},
        None,
    ],
}


def axis_of(values: list[Any]) -> st.SearchStrategy[Any]:
    some = st.lists(st.sampled_from(values), min_size=1, max_size=3)
    return some.map(lambda chosen: choice(*chosen))


SPACES = st.fixed_dictionaries(
    {
        "global_batch_size": st.sampled_from([8, choice(8, 9, "8"), choice(8, 16)]),
        "deepspeed_config": st.sampled_from(
            [
                "plain.json",
                choice("plain.json", "schedule.json"),
                choice("plain.json", "wrong.json", "none.json"),
                choice(3, {"zero_optimization": {"stage": 0}}),
                {"zero_optimization": {"stage": choice(1, 9)}},
            ]
        ),
    },
    optional={name: axis_of(values) for name, values in VALUES.items() if name != "global_batch_size"},
)


def test_a_schedule_is_judged_with_its_micro_batches_and_its_chunks() -> None:
    """Two stages; what a schedule cannot do is said once a point, of the key that it is about."""
    hyperparameters = {
        "global_batch_size": 24,
        "learning_rate": 0.1,
        "deepspeed_config": "plain.json",
        "pipe_parallel_size": 2,
        "pipe_schedule": choice("1f1b", "interleaved", "dualpipev", "zb-h1"),
        "pipe_chunks": choice(None, 4),
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": choice(2, 3, 4)},
    }
    read = experiment(hyperparameters)
    accumulation, chunks, schedule = range(3)
    assert [axis.path[-1] for axis in read.space.axes] == [
        "gradient_accumulation_steps",
        "pipe_chunks",
        "pipe_schedule",
    ]
    runs, refused = set(), {}
    for verdict in judge_points(read, points_of(read.space), where(slots=2)):
        for point in verdict.points:
            values = (point.values[schedule], point.values[chunks], point.values[accumulation])
            if verdict.problems:
                (problem,) = verdict.problems
                refused[values] = problem.code
            else:
                runs.add(values)
    any_batch = {(name, None, count) for name in ("1f1b", "zb-h1") for count in (2, 3, 4)}
    folded = {("dualpipev", None, 4)}
    in_turns = {("interleaved", parts, count) for parts in (None, 4) for count in (2, 4)}
    assert runs == any_batch | folded | in_turns
    assert {values[1] for values, code in refused.items() if code == "pipe-chunks"} == {4}
    assert {values for values, code in refused.items() if code == "pipe-schedule"} == {
        ("dualpipev", None, 2),
        ("dualpipev", None, 3),
        ("interleaved", None, 3),
        ("interleaved", 4, 3),
    }


@given(SPACES)
def test_judging_together_is_judging_alone(hyperparameters: dict[str, Any]) -> None:
    read = experiment(hyperparameters)
    before = json.dumps(hyperparameters)
    points = list(points_of(read.space))[:64]
    verdicts = judge_points(read, points, where())
    found = {id(point): verdict for verdict in verdicts for point in verdict.points}
    assert len(found) == len(points) == sum(len(verdict.points) for verdict in verdicts)
    for point in points:
        verdict = found[id(point)]
        told = [str(problem) for problem in verdict.problems], [str(problem) for problem in verdict.warnings]
        assert told == alone(read, point)
        assert (verdict.resolved is None) == bool(verdict.problems)
    assert json.dumps(hyperparameters) == before


def test_what_does_not_decide_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def counted(*args: Any, **kwargs: Any) -> ResolvedConfig | None:
        calls.append(args)
        return resolve_stated(*args, **kwargs)

    monkeypatch.setattr("determined_ds.check.space.judging.resolve_stated", counted)
    many = {"type": "double", "minval": 0, "maxval": 1, "count": 500}
    read = experiment({"global_batch_size": choice(8, 16), "dropout": many, "deepspeed_config": "plain.json"})
    (verdict,) = judge_points(read, points_of(read.space), where(CPU, slots=2))
    assert [problem.code for problem in verdict.problems] == ["auto-undetermined"]
    assert (len(verdict.points), len(calls)) == (1000, 2)


def test_a_check_of_the_callers_is_part_of_the_verdict() -> None:
    """What it reads of a point decides too."""

    def check(hyperparameters: Document, resolved: ResolvedConfig | None) -> list[Problem]:
        wide = hyperparameters.get(("model", "width"), 0) > 2
        return [Problem(key="model.width", message="too wide", fix="write 2")] if wide and resolved else []

    base = {"global_batch_size": 8, "learning_rate": 0.1, "deepspeed_config": "plain.json"}
    read = experiment({**base, "model": {"width": choice(1, 2, 3, 4), "depth": choice(1, 2)}})
    verdicts = judge_points(read, points_of(read.space), where(), check=check)
    assert [len(verdict.points) for verdict in verdicts] == [4, 4]
    for verdict in verdicts:
        for point in verdict.points:
            assert ([str(problem) for problem in verdict.problems], []) == alone(read, point, check)


def test_a_verdict_on_slots_and_machines() -> None:
    read = experiment({"global_batch_size": 8, "pipe_parallel_size": choice(1, 3)})
    verdicts = judge_points(read, points_of(read.space), where(CPU, slots=4, slots_origin="--slots"))
    assert [(len(verdict.points), len(verdict.problems)) for verdict in verdicts] == [(1, 0), (1, 1)]
    assert verdicts[1].problems[0].origin == "--slots"


# ----------------------------------------------------------------------------------------------- the recorder


@pytest.mark.parametrize(
    "read",
    [
        lambda data: data["a"],
        lambda data: data.get("a"),
        lambda data: Document(name="x", data=data).get(("a",)),
        lambda data: Document(name="x", data=data).get(("a", "b")),
        lambda data: dict(data),
        lambda data: {**data},
        lambda data: data.copy(),
        lambda data: copy.copy(data),
        lambda data: copy.deepcopy(data),
        lambda data: list(data.items()),
        lambda data: list(data.values()),
        lambda data: json.dumps(data),
        lambda data: repr(data),
        lambda data: data == {"a": 1},
        lambda data: data != {"a": 1},
        lambda data: data | {},
        lambda data: {} | data,
        lambda data: {}.update(data),
        lambda data: dict(b=1, **data),
        lambda data: data.setdefault("a", 1),
        lambda data: data.pop("a"),
        lambda data: data.popitem(),
    ],
)
def test_no_value_is_read_unseen(read: Any) -> None:
    recorder = ReadRecorder({"a": {"b": 1}})
    read(recorder)
    assert recorder.read == {"a"}


def test_keys_are_no_values() -> None:
    recorder = ReadRecorder({"a": 1, "b": 2})
    assert list(recorder) == ["a", "b"]
    assert "a" in recorder
    assert len(recorder) == 2
    assert recorder.keys() == {"a", "b"}
    assert recorder.read == set()
