"""Every key in a DeepSpeed JSON is one that DeepSpeed reads, as it reads it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from determined_ds import Problem
from tests.config.deciding import AUTO, KEYS, Json, known_keys, nested, told
from tests.package import CUDA

NODES = dict(known_keys())
GONE = {key for key, node in NODES.items() if {"removed", "deprecated"} & node.keys()}
CURRENT = [key for key in NODES if key not in GONE and not key.startswith("bfloat16")]


def errors(data: Json, at: str | None = None) -> list[Problem]:
    """What is wrong with a JSON, or at a key of it, beside a batch that is right."""
    found, _ = told({} if "train_batch_size" in data else {"global_batch_size": 8}, data, accelerator=CUDA)
    assert all(problem.fix for problem in found)
    return [problem for problem in found if at in (None, problem.key)]


@pytest.mark.long(
    "of another DeepSpeed; what is decided is read by the installed one in test_reconcile_deepspeed"
)
def test_the_keys_that_are_known_are_those_of_the_installed_deepspeed(tmp_path: Path) -> None:
    """In a process of its own: the generator fixes DeepSpeed's accelerator before it imports DeepSpeed."""
    generator, fresh = Path(__file__).with_name("generate_deepspeed_keys.py"), tmp_path / KEYS.name
    subprocess.run([sys.executable, generator, fresh], check=True, timeout=300)
    assert KEYS.read_text() == fresh.read_text(), f"Run {generator.name}, and commit the result."


def test_a_misspelt_key_is_refused_at_every_depth() -> None:
    """For most slips with the one that was meant."""
    guessed = []
    for key in CURRENT:
        section, _, name = key.rpartition(".")
        slip = f"{section}.{name[:-2]}{name[-1]}".lstrip(".") if len(name) > 3 else f"{key}{name[-1]}"
        if slip not in NODES and (not section or NODES[section].get("additionalProperties") is False):
            (found,) = errors(nested(slip, True), slip)
            assert found.code == "unknown-key"
            guessed.append(repr(name) in found.fix)
    assert sum(guessed) >= 0.8 * len(guessed) >= 200


def test_a_key_that_is_gone_is_refused_with_deepspeeds_words() -> None:
    """Whatever its value, as DeepSpeed does; an old name with the new one, unless it switches off what is off."""
    for key in GONE:
        node = NODES[key]
        [(keyword, said)] = [(word, node[word]) for word in ("removed", "deprecated") if word in node]
        for given in (True, {}, None, AUTO, *([] if "boolean" in node.get("type", ()) else [False])):
            (found,) = errors(nested(key, given), key)
            assert found.code == f"{keyword}-key"
            assert said.strip() in f"{found.message} {found.fix}"


# A value of each type, and one of none of the others.
OF_TYPE: Json = {"integer": 3, "number": 0.5, "string": "x", "boolean": True}
OF_TYPE |= {"object": {}, "array": [], "null": None}


@pytest.mark.parametrize("kind", OF_TYPE)
def test_a_value_of_the_wrong_type_is_refused(kind: str) -> None:
    """Null, too, where DeepSpeed takes none."""
    takes = {kind, "number"} if kind == "integer" else {kind}
    for key in CURRENT:
        found = [problem.code for problem in errors(nested(key, OF_TYPE[kind]), key)]
        assert ("wrong-type" in found) == (not takes & {*NODES[key].get("type", takes)}), (key, found)
