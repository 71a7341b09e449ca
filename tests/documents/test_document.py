"""A document remembers where each of its values came from, whatever is laid over it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import (
    MAX_UNKNOWN,
    Document,
    KeyPath,
    Place,
    dotted,
    get_path,
    nearest,
    plain_copy,
    unknown_key,
    unknown_keys,
)
from determined_ds.errors import NOT_GIVEN

LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
KEYS = st.sampled_from(["a", "b", "c", "d"])
TREES = st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=4), max_leaves=12)
MAPPINGS = st.dictionaries(KEYS, TREES, max_size=4)
FULL_TREES = st.recursive(
    LEAVES, lambda inner: st.dictionaries(KEYS, inner, min_size=1, max_size=4), max_leaves=9
)
PATHS = st.lists(KEYS, min_size=1, max_size=3).map(tuple)


def leaves(data: Any, path: KeyPath = ()) -> list[KeyPath]:
    if isinstance(data, dict) and data:
        return [leaf for key, value in data.items() for leaf in leaves(value, (*path, key))]
    return [path]


@given(MAPPINGS, PATHS, FULL_TREES)
def test_overwriting_is_what_determined_calls_merging(
    data: dict[str, Any], path: KeyPath, value: Any
) -> None:
    """Except where Determined fails: on a mapping that is laid over a value that is none."""
    from determined.util import merge_dicts

    nested = value
    for step in reversed(path):
        nested = {step: nested}
    try:
        expected = merge_dicts(data, nested)
    except (TypeError, AttributeError):
        return
    assert Document(name="a", data=data).overwritten(path, value, "--set").data == expected


@given(MAPPINGS, PATHS, TREES)
def test_overwriting_reaches_its_place_and_nothing_else(
    data: dict[str, Any], path: KeyPath, value: Any
) -> None:
    before = copy.deepcopy(data)
    places: dict[KeyPath, Place] = {leaf: Place(n, 1) for n, leaf in enumerate(leaves(data), 1) if leaf}
    document = Document(name="a.yaml", data=data, places=places)
    after = document.overwritten(path, value, "--set")
    assert data == before
    if not isinstance(value, dict):
        assert after.get(path, "missing") == value
    for leaf in leaves(after.data):
        if leaf[: len(path)] != path and leaf in places:
            assert after.get(leaf) == document.get(leaf)
            assert after.origin(leaf) == document.origin(leaf)
    for leaf in leaves(value, path):
        if after.get(leaf, "missing") != document.get(leaf, "missing"):
            assert after.origin(leaf) == "--set"


@given(MAPPINGS, PATHS, TREES)
def test_a_subdocument_tells_the_same_origins(data: dict[str, Any], path: KeyPath, value: Any) -> None:
    places: dict[KeyPath, Place] = {leaf: Place(n, 1) for n, leaf in enumerate(leaves(data), 1) if leaf}
    document = Document(name="a.yaml", data=data, places=places).overwritten(path, value, "--set")
    for key, section in document.data.items():
        if isinstance(section, dict):
            sub = document.sub((key,))
            for leaf in leaves(section):
                if leaf:
                    assert sub.key(leaf) == dotted((key, *leaf))
                    if document.origin((key, *leaf)) != document.origin((key,)):
                        assert sub.origin(leaf) == document.origin((key, *leaf))


def test_origin_is_the_nearest_that_is_known() -> None:
    document = Document(name="a.yaml", data={"a": {"b": {"c": 1}}}, places={("a", "b"): Place(2, 3)})
    assert document.origin(("a", "b", "c")) == "a.yaml:2"
    assert document.origin(("a",)) == "a.yaml"
    assert document.overwritten(("a",), 1, "--set a=1").origin(("a", "b", "c")) == "--set a=1"


def test_the_last_overwrite_is_the_origin() -> None:
    document = Document(name="a", data={"a": {"b": 1}})
    twice = document.overwritten(("a", "b"), 2, "first").overwritten(("a",), {"b": 3}, "second")
    assert twice.data == {"a": {"b": 3}}
    assert twice.origin(("a", "b")) == "second"


def test_get_reaches_into_lists() -> None:
    data = {"a": [{"b": 1}]}
    assert get_path(data, ("a", 0, "b")) == 1
    assert get_path(data, ("a", 1, "b"), "no") == "no"
    assert get_path(data, ("a", -1), "no") == "no"
    assert get_path(data, ("a", "b"), "no") == "no"


@pytest.mark.parametrize(
    ("word", "known", "meant"),
    [
        ("zero_optimisation", ["zero_optimization", "optimizer"], "zero_optimization"),
        ("slot_per_trial", ["slots_per_trial", "max_slots"], "slots_per_trial"),
        ("xyz", ["slots_per_trial"], None),
        ("a" * 10**6, ["a"], None),
    ],
)
def test_nearest(word: str, known: list[str], meant: str | None) -> None:
    assert nearest(word, known) == meant


def test_an_unknown_key_is_named_with_what_was_meant() -> None:
    document = Document(name="a.yaml", data={"zero": 1}, places={("zero",): Place(4, 1)}, prefix="ds")
    known = ["alpha", "beta"]
    assert str(unknown_key(document, ("zero",), ["zeros", *known])) == (
        "ds.zero (a.yaml:4): unknown key\n  fix: did you mean 'zeros'?"
    )
    assert unknown_key(document, ("zero",), known).fix == "known here: alpha, beta"
    assert unknown_key(document, ("zero",), known, {"zero": "one.zero"}).fix == "did you mean one.zero?"
    dotted_key = unknown_key(document, ("alpha.one.two",), known)
    assert dotted_key.fix == "write alpha: {one: {two: ...}}; a key has no dots"


def test_many_unknown_keys_are_told_once() -> None:
    """A vocabulary given for a configuration is not told word by word."""
    document = Document(name="vocab.json", data={f"word{n}": n for n in range(50_000)})
    problems = list(unknown_keys(document, (), ["optimizer"]))
    assert len(problems) == MAX_UNKNOWN + 1
    assert str(50_000 - MAX_UNKNOWN - 1) in problems[-1].message
    assert "vocab.json" in problems[-1].fix


# ------------------------------------------------------------------------------- what is the same is shared


def plainly_overwritten(data: dict[str, Any], path: KeyPath, value: Any) -> dict[str, Any]:
    """What overwriting comes to, on a copy of everything."""
    data = copy.deepcopy(data)
    node = data
    for step in path[:-1]:
        if not isinstance(node.get(step), dict):
            node[step] = {}
        node = node[step]
    merge(node, path[-1], copy.deepcopy(value))
    return data


def merge(node: dict[Any, Any], key: Any, value: Any) -> None:
    if isinstance(value, dict) and isinstance(node.get(key), dict):
        for inner, item in value.items():
            merge(node[key], inner, item)
    else:
        node[key] = value


@given(MAPPINGS, st.lists(st.tuples(PATHS, TREES), max_size=4))
def test_edits_are_laid_one_over_the_other_and_change_nothing_in_place(
    data: dict[str, Any], changes: list[tuple[KeyPath, Any]]
) -> None:
    before, given = copy.deepcopy(data), copy.deepcopy(changes)
    document = Document(name="a", data=data)
    expected, one_by_one = copy.deepcopy(data), document
    stages = [document.data]
    for path, value in changes:
        expected = plainly_overwritten(expected, path, value)
        one_by_one = one_by_one.overwritten(path, value, "--set")
        stages.append(one_by_one.data)
    frozen = copy.deepcopy(stages)
    together = document.overwritten_all((path, value, "--set") for path, value in changes)
    assert one_by_one.data == together.data == expected
    assert repr(one_by_one) == repr(together)
    one_by_one.overwritten(("a", "b", "c"), {"d": 1}, "--set").overwritten(("a", "b", "c", "d"), 2, "--set")
    assert stages == frozen
    assert (data, changes) == (before, given)


@given(MAPPINGS, st.data())
def test_without_a_leaf_all_else_is_as_it_was(data: dict[str, Any], draw: st.DataObject) -> None:
    before = copy.deepcopy(data)
    paths = [leaf for leaf in leaves(data) if leaf]
    if not paths:
        return
    path = draw.draw(st.sampled_from(paths))
    after = Document(name="a", data=data).without(path)
    assert data == before
    assert after.get(path, "missing") == "missing"
    expected = copy.deepcopy(data)
    for end in range(len(path), 0, -1):
        section = get_path(expected, path[: end - 1])
        del section[path[end - 1]]
        if section:
            break
    assert after.data == expected
    assert Document(name="a", data=data).overwritten_all([(path, NOT_GIVEN, "")]).data == expected


def test_what_is_not_overwritten_is_not_copied() -> None:
    data = {"a": {"b": {}, "c": {}}, "d": {}}
    after = Document(name="a", data=data).overwritten(("a", "b", "x"), 1, "--set").data
    assert after["d"] is data["d"]
    assert after["a"]["c"] is data["a"]["c"]
    assert data["a"]["b"] == {}


@given(TREES)
def test_a_plain_copy_shares_nothing(data: Any) -> None:
    def containers(value: Any) -> set[int]:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        own = {id(value)} if isinstance(value, (dict, list)) else set()
        return own.union(*map(containers, inner))

    copied = plain_copy(data)
    assert repr(copied) == repr(data)
    assert not containers(copied) & containers(data)


def test_other_data_of_the_same_places() -> None:
    document = Document(name="a.yaml", data={"a": 1}, places={("a",): Place(3, 1)}, prefix="p")
    other = document.holding({"a": 2})
    assert (other.get(("a",)), other.origin(("a",)), other.key(("a",))) == (2, "a.yaml:3", "p.a")
    assert document.data == {"a": 1}
