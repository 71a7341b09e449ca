"""A DeepSpeed JSON is found in the context directory; every key in it is one that DeepSpeed reads, as it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from determined_ds import Problem, load_deepspeed_config
from tests.config.deciding import AUTO, Node, known_keys, nested, told, value
from tests.package import CUDA, decide, experiment, refusals, resolved_of

ZERO = "zero_optimization"
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
NODES = dict(known_keys())
CURRENT = {
    key: node
    for key, node in NODES.items()
    if not {"removed", "deprecated"} & node.keys() and not key.startswith("bfloat16")
}
SECTIONS = {key: node for key, node in CURRENT.items() if node.get("additionalProperties") is False}


def errors(data: dict[str, Any]) -> list[Problem]:
    """What is wrong with a JSON, beside a batch that is right."""
    batch: Any = {} if set(data) & {"train_batch_size"} else {"global_batch_size": 8}
    found, _ = told(batch, data, accelerator=CUDA)
    assert all(problem.fix for problem in found)
    return found


def at(key: str, data: dict[str, Any]) -> list[Problem]:
    return [found for found in errors(data) if found.key == key]


# ------------------------------------------------------------------------------------------------------- keys


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_misspelt_key_is_refused_at_every_depth(section: str) -> None:
    """With one that is known there, and for most slips the one that was meant."""
    known = SECTIONS[section]["properties"] if section else [key for key in NODES if "." not in key]
    names = [name for name in known if f"{section}.{name}".lstrip(".") in CURRENT]
    right = 0
    for name in names:
        slip = name[:-2] + name[-1] if len(name) > 3 else name + name[-1]
        if slip in known:
            continue
        key = f"{section}.{slip}".lstrip(".")
        (found,) = at(key, nested(key, True))
        assert found.code == "unknown-key"
        right += repr(name) in found.fix
    assert right >= 0.7 * len(names)


@pytest.mark.parametrize(
    "key", [key for key, node in NODES.items() if {"removed", "deprecated"} & node.keys()]
)
def test_a_key_that_is_gone_is_refused_with_deepspeeds_words(key: str) -> None:
    """Whatever its value, as DeepSpeed does; an old name with the new one."""
    node, values = NODES[key], [True, False, {}, None, AUTO]
    code, said = "deprecated-key", node.get("deprecated", "")
    if "removed" in node:
        code, said = "removed-key", node["removed"].strip()
    for given_value in values:
        (found,) = at(key, nested(key, given_value))
        assert found.code == code
        assert said in f"{found.message} {found.fix}"


@pytest.mark.parametrize("key", ["_comment_on_zero", "// why", "#", "$schema", "__comment__"])
def test_a_comment_is_ignored_at_the_top_only_as_deepspeed_does(key: str) -> None:
    assert errors({key: "why it is so", ZERO: {"stage": 1}}) == []
    (found,) = at(f"{ZERO}.{key}", {ZERO: {"stage": 1, key: "why"}})
    assert found.code == "unknown-key"


# ------------------------------------------------------------------------------------------------------- types


def fits(given_value: Any, node: Node) -> bool:
    types = node.get("type", list(OF_TYPE))
    own = next(name for name, example in OF_TYPE.items() if type(example) is type(given_value))
    return own in types or (own == "integer" and "number" in types)


def switched_on(key: str, data: dict[str, Any]) -> list[dict[str, Any]]:
    """The same in sections that are in use, under every stage of ZeRO."""
    section, _, inner = key.partition(".")
    if section == ZERO and inner and inner != "stage":
        return [data, *({ZERO: {**data[ZERO], "stage": stage}} for stage in (1, 2, 3))]
    if inner and inner != "enabled" and f"{section}.enabled" in NODES:
        return [data, {section: {**data[section], "enabled": True}}]
    return [data]


@pytest.mark.parametrize("section", sorted({key.partition(".")[0] for key in CURRENT}))
def test_a_value_of_the_wrong_type_is_refused_wherever_it_is_used(section: str) -> None:
    """Null, too, where DeepSpeed takes none. Never a traceback."""
    keys = [key for key in CURRENT if key.partition(".")[0] == section]
    for key in keys:
        for wrong in OF_TYPE.values():
            for data in switched_on(key, nested(key, wrong)):
                found = [each for each in at(key, data) if each.code == "wrong-type"]
                assert bool(found) != fits(wrong, NODES[key]), (key, wrong, data)


@pytest.mark.parametrize(
    ("data", "said", "fix"),
    [
        ({"train_batch_size": "8"}, "must be an integer, not a string", "remove the quotes: 8"),
        ({"train_batch_size": 0}, "must be more than 0", "write more than 0"),
        ({"bf16": True}, "must be a mapping, not true or false", 'write {"enabled": true}'),
        ({ZERO: True}, "must be a mapping", 'write {"stage": 1}'),
        ({ZERO: {"stage": 4}}, "not one of the allowed values", "use one of 0, 1, 2, 3"),
        ({ZERO: {"offload_param": {"device": "gpu"}}}, "not one of", "use one of none, cpu, nvme"),
        ({ZERO: {"offload_optimizer": {"ratio": 1.5}}}, "at most 1", "write at most 1"),
        ({"optimizer": {"type": "AdmW"}}, "no such optimizer", "did you mean AdamW?"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": "1e-3"}}}, "a number", "remove the quotes: 0.001"),
        ({"optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "", "write gradient_clipping"),
    ],
)  # fmt: skip
def test_a_wrong_value_is_refused_with_its_fix(data: dict[str, Any], said: str, fix: str) -> None:
    (found,) = errors(data)
    assert said in found.message
    assert fix in found.fix


@pytest.mark.parametrize(
    ("data", "key", "given_to_deepspeed"),
    [
        ({ZERO: {"reduce_bucket_size": 5e8, "stage": 2.0}}, ZERO, {"reduce_bucket_size": 500_000_000, "stage": 2}),
        ({"optimizer": {"type": "SomethingOfTomorrow"}}, "optimizer.type", "SomethingOfTomorrow"),
        ({"optimizer": {"type": "X", "params": {"any": {"at": ["all"]}}}}, "optimizer.params.any.at", ["all"]),
    ],
)  # fmt: skip
def test_what_deepspeed_accepts_is_accepted(data: dict[str, Any], key: str, given_to_deepspeed: Any) -> None:
    found = value(decide(ds=data, accelerator=CUDA), key)
    assert repr(found) == repr(given_to_deepspeed)


# ----------------------------------------------------------------------------------------------------- finding


def load(path: str, folder: Path) -> Any:
    config = f"entrypoint: python3 train.py\nhyperparameters:\n  global_batch_size: 8\n  deepspeed_config: {path!r}\n"
    return resolved_of(experiment(config), context_dir=folder)


def test_a_path_is_relative_to_the_context_directory(tmp_path: Path) -> None:
    (tmp_path / "ds").mkdir()
    file = tmp_path / "ds" / "zero.json"
    file.write_text('{\n"steps_per_print": 7}')
    for path in ("ds/zero.json", str(file), "ds/../ds/zero.json"):
        resolved = load(path, tmp_path)
        assert resolved.ds_config["steps_per_print"] == 7
        assert resolved.origins["steps_per_print"] == f"{tmp_path / path}:2"
    assert load_deepspeed_config(file) == {"steps_per_print": 7}


@pytest.mark.parametrize(
    ("path", "said", "fix"),
    [
        ("zero.json", "no such file", "other.json"),
        ("ds", "is not a file", "other.json"),
        ("link.json", "outside the context directory", "move it inside"),
        ("/etc/passwd", "outside the context directory", "move it inside"),
        ("a" * 5000, "no such file", "other.json"),
        ("loop.json", "", ""),
    ],
)
def test_any_other_path_is_refused(path: str, said: str, fix: str, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "ds").mkdir(parents=True)
    for file in (root / "other.json", root / "ds" / "one.json", tmp_path / "out.json"):
        file.write_text("{}")
    (root / "link.json").symlink_to(tmp_path / "out.json")
    (root / "loop.json").symlink_to(root / "loop.json")
    (found,) = refusals(lambda: load(path, root))
    assert (found.key, found.value, found.origin) == (
        "hyperparameters.deepspeed_config",
        path,
        "const.yaml:4",
    )
    assert said in found.message
    assert fix in found.fix
