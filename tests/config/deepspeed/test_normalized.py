"""A DeepSpeed JSON is found in the context directory; every key in it is one that DeepSpeed reads, as it reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.config.deepspeed.normalized import (
    find_deepspeed_config,
    known_keys,
    located_problems,
    normalized,
)
from determined_ds.config.deepspeed.old_names import NEW_NAMES
from determined_ds.config.numbers import AUTO
from determined_ds.documents.document import KeyPath, dotted, get_path
from determined_ds.errors import Problem
from tests.making import ds_json, hyperparameters, refusal

Node = dict[str, Any]
# A value of each type, and one of none of the others.
OF_TYPE: dict[str, Any] = {
    "integer": 3,
    "number": 0.5,
    "string": "x",
    "boolean": True,
    "object": {},
    "array": [],
    "null": None,
}


def nodes(node: Node | None = None, path: KeyPath = ()) -> Iterator[tuple[KeyPath, Node]]:
    """Every key that DeepSpeed knows."""
    for key, child in (node or known_keys()).get("keys", {}).items():
        yield (*path, key), child
        yield from nodes(child, (*path, key)) if child.get("keys") else ()


NODES = list(nodes())
CURRENT = [
    (path, node)
    for path, node in NODES
    if not {"removed", "deprecated"} & node.keys() and path[0] != "bfloat16"
]
SECTIONS = [
    ((), known_keys()),
    *((path, node) for path, node in CURRENT if node.get("keys") and not node.get("free")),
]


def nested(path: KeyPath, value: Any) -> dict[str, Any]:
    for step in reversed(path):
        value = {step: value}
    assert isinstance(value, dict)
    return value


def problems(data: dict[str, Any]) -> list[Problem]:
    found = [problem for _, problem in located_problems(ds_json(data))]
    for problem in found:
        assert problem.fix, problem
    return found


def problem(data: dict[str, Any]) -> Problem:
    (found,) = problems(data)
    return found


def ids(items: list[tuple[KeyPath, Node]]) -> list[str]:
    return [dotted(path) or "root" for path, _ in items]


# ------------------------------------------------------------------------------------------------ unknown keys


@pytest.mark.parametrize(("path", "node"), SECTIONS, ids=ids(SECTIONS))
def test_a_mistyped_key_is_refused_at_every_depth(path: KeyPath, node: Node) -> None:
    """With one that is known there, and for most slips the one that was meant."""
    names = [key for key in node["keys"] if (*path, key) in dict(CURRENT)]
    right = 0
    for name in names:
        slip = name[:-2] + name[-1] if len(name) > 3 else name + name[-1]
        if slip in node["keys"]:
            continue
        found = problem(nested((*path, slip), True))
        assert (found.key, found.code) == (dotted((*path, slip)), "unknown-key")
        assert "value" in found.fix or any(
            repr(known) in found.fix or known in found.fix for known in node["keys"]
        )
        right += repr(name) in found.fix
    assert right >= 0.7 * len(names)


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("stage", "zero_optimization.stage"),
        ("zero_hpz_partition_size", "zero_optimization.zero_hpz_partition_size"),
        ("loss_scale", "fp16.loss_scale"),
        ("zero_optimisation", "'zero_optimization'"),
        ("train_batchsize", "'train_batch_size'"),
        ("BF16", "look the name up"),
    ],
)
def test_a_key_at_the_wrong_level_is_told_its_own(key: str, meant: str) -> None:
    assert meant in problem({key: 1}).fix


def test_a_free_section_takes_any_name() -> None:
    free = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "anything": {"at": ["all"]}}}
    assert problems({"optimizer": free, "scheduler": {"type": "StepLR", "params": {"step_size": 3}}}) == []


@pytest.mark.parametrize(
    ("path", "node"),
    [item for item in NODES if "removed" in item[1]],
    ids=ids([item for item in NODES if "removed" in item[1]]),
)
def test_a_removed_key_is_refused_with_deepspeeds_words(path: KeyPath, node: Node) -> None:
    """Whatever its value, as DeepSpeed does."""
    for value in (True, False, {}, None, AUTO):
        found = problem(nested(path, value))
        assert (found.key, found.code) == (dotted(path), "removed-key")
        assert found.message == node["removed"].strip()


OLD = [item for item in NODES if "deprecated" in item[1] and item[0] not in NEW_NAMES]


@pytest.mark.parametrize(("path", "node"), OLD, ids=ids(OLD))
def test_an_old_name_that_is_read_no_more_is_refused_with_the_new_one(path: KeyPath, node: Node) -> None:
    found = problem(nested(path, True))
    assert (found.key, found.code) == (dotted(path), "deprecated-key")
    assert node["deprecated"] in found.fix


def test_a_parameter_that_is_refused_as_an_old_name_is_told_once() -> None:
    found = problem({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}})
    assert (found.code, found.fix) == ("deprecated-key", "write gradient_clipping instead")


# --------------------------------------------------------------------------------------------------- comments


@pytest.mark.parametrize(
    "key", ["_comment", "_comment_on_zero", "//", "// why", "#", "$schema", "__comment__"]
)
def test_a_comment_at_the_top_is_read_over_as_deepspeed_does(key: str) -> None:
    assert problems({key: "why it is so", "zero_optimization": {"stage": 1}}) == []
    embedded = replace(ds_json({key: "why"}), prefix="hyperparameters.deepspeed_config")
    assert located_problems(embedded) == []


def test_a_comment_further_down_is_refused_as_deepspeed_does() -> None:
    found = problem({"zero_optimization": {"stage": 1, "_comment": "why"}})
    assert (found.key, found.code) == ("zero_optimization._comment", "unknown-key")
    assert found.fix == "remove it: DeepSpeed takes no comment here"


# ------------------------------------------------------------------------------------------------------- types


def fits(value: Any, node: Node) -> bool:
    types = node.get("types", list(OF_TYPE))
    own = next(name for name, example in OF_TYPE.items() if type(example) is type(value))
    return own in types or (own == "integer" and "number" in types)


def test_a_value_of_another_type_is_refused() -> None:
    for path, node in CURRENT:
        for value in OF_TYPE.values():
            wrong = [found for found in problems(nested(path, value)) if found.code == "wrong-type"]
            assert bool(wrong) != fits(value, node), (path, value, wrong)
            assert [(found.key, found.value) for found in wrong[:1]] == [(dotted(path), value)] * bool(wrong)


def test_auto_is_taken_for_any_value() -> None:
    assert [path for path, _ in CURRENT if problems(nested(path, AUTO))] == []


@pytest.mark.parametrize(
    ("data", "said", "fix"),
    [
        ({"train_batch_size": "8"}, "must be an integer, not a string", "remove the quotes: 8"),
        ({"train_batch_size": True}, "must be an integer, not true or false", "write an integer"),
        ({"train_batch_size": 8.5}, "must be an integer, not a number", "write an integer"),
        ({"train_batch_size": 0}, "must be above 0", "write a value above 0"),
        ({"train_batch_size": [8]}, "must be an integer, not a list", "write an integer"),
        ({"gradient_clipping": "1.0"}, "must be a number, not a string", "remove the quotes: 1"),
        ({"gradient_clipping": None}, "must be a number, not null", "remove it"),
        ({"bf16": {"enabled": 1}}, "must be true or false, not an integer", "write true or false"),
        ({"bf16": {"enabled": "true"}}, "must be true or false, not a string", "write true or false"),
        ({"bf16": True}, "must be a mapping, not true or false", 'write {"enabled": true}'),
        ({"scheduler": None}, "must be a mapping, not null", "remove it"),
        ({"zero_optimization": {"stage": 4}}, "not one of the values", "use 0, 1, 2, 3"),
        ({"zero_optimization": {"stage": -1}}, "not one of the values", "use 0, 1, 2, 3"),
        ({"zero_optimization": {"offload_param": {"device": "gpu"}}}, "not one of", '"none", "cpu", "nvme"'),
        ({"zero_optimization": {"offload_optimizer": {"ratio": 1.5}}}, "at most 1.0", "at most 1.0"),
        ({"zero_optimization": {"zenflow": {"topk_ratio": 1}}}, "below 1.0", "below 1.0"),
        ({"expert_parallel": {"load_balance_coeff": 0.1}}, "must be null", "remove it"),
        ({"optimizer": {"type": 1}}, "must be a string", "write a string"),
        ({"optimizer": {"type": "AdmW"}}, "no such optimizer", "did you mean AdamW?"),
        ({"optimizer": {"type": "sgd"}}, "no such optimizer", "did you mean SGD?"),
        ({"scheduler": {"type": "WarmUpLR"}}, "no such scheduler", "did you mean WarmupLR?"),
        (
            {"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}},
            "must be a number",
            "remove the quotes: 0.001",
        ),
        ({"optimizer": {"type": "AdamW", "params": {"lr": True}}}, "must be a number", "write a number"),
        ({"optimizer": {"type": "AdamW", "params": {"betas": 0.9}}}, "list of numbers", "[0.9, 0.999]"),
        (
            {"optimizer": {"type": "AdamW", "params": {"betas": ["auto", 1]}}},
            "list of numbers",
            "[0.9, 0.999]",
        ),
    ],
)
def test_what_is_wrong_is_told_with_its_fix(data: dict[str, Any], said: str, fix: str) -> None:
    found = problem(data)
    assert said in found.message
    assert fix in found.fix


@pytest.mark.parametrize(
    "data",
    [
        {"zero_optimization": {"reduce_bucket_size": 5e8, "stage": 2.0}},
        {"zero_optimization": True},
        {"gradient_clipping": 1},
        {"communication_data_type": "FP32", "gradient_allreduce_op": "Mean"},
        {"optimizer": {"type": "adamW"}, "scheduler": {"type": "CosineAnnealingLR"}},
        {"optimizer": {"type": "SomethingOfTomorrow"}},
        {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}},
    ],
)
def test_what_deepspeed_takes_is_taken(data: dict[str, Any]) -> None:
    assert problems(data) == []


def test_every_problem_is_told_with_its_line() -> None:
    text = '{\n"train_batch_size": "8",\n"zero_optimization": {\n"stage": 4,\n"stagee": 1\n},\n"amp": {}\n}'
    found = {(p.key, p.origin) for _, p in located_problems(ds_json(text))}
    assert found == {
        ("train_batch_size", "ds.json:2"),
        ("zero_optimization.stage", "ds.json:4"),
        ("zero_optimization.stagee", "ds.json:5"),
        ("amp", "ds.json:7"),
    }


VALUES = st.sampled_from(
    [*OF_TYPE.values(), AUTO, 0, -1, 5e8, 10**18, "", "fp16", "AdamW", {"enabled": True}, [AUTO]]
)
PATHS = st.sampled_from([path for path, _ in NODES] + [("typo",), ("zero_optimization", "typo")])


@given(st.lists(st.tuples(PATHS, VALUES), max_size=6))
def test_what_is_wrong_can_be_taken_out(edits: list[tuple[KeyPath, Any]]) -> None:
    """Each problem has the path of its value; the rest, in normal form, is as the rest of the library reads it."""
    document = ds_json({})
    for path, value in edits:
        document = document.overwritten(path, value, "edit")
    for path, found in located_problems(document):
        assert found.fix
        assert path == () or dotted(path) == found.key
    if not located_problems(document):
        plain = normalized(document)
        assert located_problems(plain) == []
        assert not isinstance(plain.get(("zero_optimization",)), bool)
        for path, node in CURRENT:
            value = get_path(plain.data, path)
            if isinstance(value, float) and "number" not in node.get("types", ["number"]):
                assert not value.is_integer()


def test_the_normal_form_keeps_meaning_and_origin() -> None:
    plain = normalized(
        ds_json('{\n"train_batch_size": 8.0,\n"zero_optimization": true,\n"gradient_clipping": 1.0}')
    )
    assert plain.data == {"train_batch_size": 8, "zero_optimization": {"stage": 1}, "gradient_clipping": 1.0}
    assert [type(value) for value in plain.data.values()] == [int, dict, float]
    assert plain.origin(("train_batch_size",)) == "ds.json:2"
    assert plain.origin(("zero_optimization", "stage")) == "ds.json:3"
    assert normalized(ds_json({"zero_optimization": False})).data == {"zero_optimization": {"stage": 0}}


# ----------------------------------------------------------------------------------------------------- finding


def load(value: Any, folder: Path) -> Any:
    hp = hyperparameters(f"lr: 1\ndeepspeed_config: {json.dumps(value)}")
    return find_deepspeed_config(hp, folder)


def test_a_path_is_relative_to_the_context_directory(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    (tmp_path / "ds" / "zero.json").write_text('{\n"bf16": {}}')
    read = load("ds/zero.json", tmp_path)
    assert read.data == {"bf16": {}}
    assert read.origin(("bf16",)) == f"{tmp_path}/ds/zero.json:2"
    assert load(str(tmp_path / "ds" / "zero.json"), tmp_path).data == read.data
    assert load("ds/../ds/zero.json", tmp_path).data == read.data


def test_a_mapping_is_taken_with_its_places() -> None:
    hp = hyperparameters("deepspeed_config:\n  zero_optimization:\n    stage: 1\n")
    read = find_deepspeed_config(hp, Path())
    assert read.origin(("zero_optimization", "stage")) == "hp.yaml:3"
    assert find_deepspeed_config(hyperparameters("lr: 1"), Path()).data == {}


@pytest.mark.parametrize(
    ("value", "said", "fix"),
    [
        ("zero.json", "no such file", "other.json"),
        ("ds/zero.json", "no such file", "there are: ds/one.json"),
        ("", "is not a file", "other.json"),
        ("ds", "is not a file", "other.json"),
        ("../out.json", "outside the context directory", "move it inside"),
        ("link.json", "outside the context directory", "move it inside"),
        ("/etc/passwd", "outside the context directory", "move it inside"),
        ("a" * 5000, "is not a valid path", "relative to the context directory"),
        ("a\0b", "is not a valid path", "relative to the context directory"),
    ],
)
def test_any_other_path_is_refused(value: str, said: str, fix: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "ds").mkdir(parents=True)
    for file in (root / "other.json", root / "ds" / "one.json", tmp_path / "out.json"):
        file.write_text("{}")
    (root / "link.json").symlink_to(tmp_path / "out.json")
    found = refusal(lambda: load(value, root))
    assert (found.key, found.value, found.origin) == ("hyperparameters.deepspeed_config", value, "hp.yaml:2")
    assert said in found.message
    assert fix in found.fix


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop.json").symlink_to(tmp_path / "loop.json")
    refusal(lambda: load("loop.json", tmp_path))
