"""YAML and JSON are read whole, with every place, or refused with a place: never a traceback, never a hang."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds import ConfigError, Problem, load_deepspeed_config, load_experiment
from tests.package import DS_CONFIGS, EXPERIMENTS, ds_json, hyperparameters, refusal, refusals

KEYS = st.text("abcdefé_XYZ", min_size=1, max_size=6)
TEXTS = st.text("ab :#'\"\\é\n", max_size=6)
SCALARS = st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | TEXTS
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
)
DATA = st.dictionaries(KEYS, VALUES, max_size=4)


def keys(data: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The path of every key below, those in lists included."""
    if isinstance(data, dict):
        yield from ((*path, key) for key in data)
    if isinstance(data, (dict, list)):
        for key, value in data.items() if isinstance(data, dict) else enumerate(data):
            yield from keys(value, (*path, key))


@given(DATA, st.sampled_from([None, True, False]))
def test_all_is_read_with_every_place(data: dict[str, Any], flow: bool | None) -> None:
    of_json = json.dumps(data, indent=None if flow else 2, ensure_ascii=False)
    of_yaml = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    for text, read, quoted in ((of_json, ds_json, '"{}"'), (of_yaml, hyperparameters, "[\"'?]? ?{}")):
        document: Any = read(text)
        assert document.data == data
        for path in keys(data):
            place = document.origin(path)
            at_place = text.split("\n")[place.line - 1][place.column - 1 :]
            assert re.match(quoted.format(path[-1]), at_place)


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiments_mean_what_they_mean_to_determined(path: Path) -> None:
    from determined.common.util import yaml_safe_load

    assert load_experiment(path).document.data == yaml_safe_load(path.read_text())


def test_a_scalar_is_what_the_master_takes_it_for() -> None:
    """The master parses with Go's library: a number needs no dot, and times and dates are strings."""
    numbers = {"1e-3": 0.001, "1_000": 1000, "0x1f": 31, "0o17": 15, "017": 15, "yes": True, "~": None}
    texts = {text: text for text in ("1:30", "2024-01-01")} | {"'1e-3'": "1e-3"}
    for text, value in {**numbers, **texts}.items():
        assert repr(hyperparameters(f"a:\n  {text}").data["a"]) == repr(value)


def test_anchors_are_copied_and_merges_filled() -> None:
    document = hyperparameters("""base: &base {x: 1, y: [1, 2]}
own: &own
  y: own
  <<: *base
first_wins: {<<: [*own, *base]}
copy: *base
""")
    assert document.data["own"] == document.data["first_wins"] == {"x": 1, "y": "own"}
    assert (document.origin(("own", "x")), document.origin(("own", "y"))) == ("hp.yaml:1", "hp.yaml:3")
    document.data["copy"]["y"].append(3)
    assert document.data["base"]["y"] == [1, 2]


def test_every_repeated_key_is_reported_with_both_lines() -> None:
    of_yaml = refusals(lambda: hyperparameters("a:\n  b: 1\n  c: 2\n  b: 3\nd: 1\nd: 2\n"))
    of_json = refusals(lambda: ds_json('{"a": {\n"b": 1,\n\n"b": 3}, "d": 1, "d": 2}'))
    for problems in (of_yaml, of_json):
        inner, outer = sorted(problems, key=lambda problem: problem.key)
        assert (inner.key, inner.message, outer.key) == ("a.b", "given twice, on lines 2 and 4", "d")


def laughs(levels: int) -> str:
    """Anchors, each of which holds the one before ten times."""
    lines = [f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, levels)]
    return "".join(["a0: &a0 [lol]\n", *lines])


# A text, its place, what fixes it; of some a naive reader makes what fits in no memory.
BROKEN: list[tuple[Callable[[str], Any], str, str, str]] = [
    (hyperparameters, "a: *b", "hp.yaml:1:4", "quote"),
    (hyperparameters, "a: [1, .nan]", "hp.yaml:1:8", "finite"),
    (hyperparameters, "a: !!python/object/apply:os.system [ls]", "hp.yaml:1:4", "plain"),
    (hyperparameters, laughs(30), "hp.yaml:1:5", "nested in itself"),
    (hyperparameters, "\n".join(" " * n + "a:" for n in range(1000)), "hp.yaml:10", "is a configuration"),
    (ds_json, '{\n  // no\n  "a": 1}', "ds.json:2:3", "no comments"),
    (ds_json, '{"a": NaN}', "ds.json:1:7", "finite"),
    (hyperparameters, "a: " + "[" * 200_000, "hp.yaml:1:", "is a configuration"),
    (ds_json, '{"a": ' * 500 + "1" + "}" * 500, "ds.json:1:", "nested"),
]


def test_a_broken_text_is_refused_with_its_place() -> None:
    for read, text, place, fix in BROKEN:
        problem = refusal(lambda read=read, text=text: read(text))
        assert problem.origin.startswith(place)
        assert fix in problem.fix


SNIPPETS = [
    b"9" * 80,
    *b"<<: |&a |*a|1e999|!!int |- |? |...\n|---\n|NaN|//|\0|\t|{|}|:|'|>|%|,|~|\"".split(b"|"),
    *(b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\u0000", b'"\\ud800"'),
]
EDITS = st.tuples(st.booleans(), st.floats(0, 1, exclude_max=True), st.sampled_from(SNIPPETS))


def problems_of(step: Callable[[], Any]) -> tuple[Problem, ...]:
    try:
        step()
    except ConfigError as error:
        return error.problems
    return ()


@given(source=st.sampled_from([*EXPERIMENTS, *DS_CONFIGS]), edits=st.lists(EDITS, min_size=1, max_size=5))
def test_whatever_is_done_to_a_text_it_is_read_or_refused_with_its_place(
    source: Path, edits: list[tuple[bool, float, bytes]], tmp_path: Path
) -> None:
    """Snippets are put in, or up to 40 bytes replaced by them."""
    content = source.read_bytes()
    for cuts, position, snippet in edits:
        start = int(position * len(content))
        content = content[:start] + snippet + content[start + 40 * cuts :]
    path = tmp_path / source.name
    path.write_bytes(content)
    is_json = source.suffix == ".json"
    for problem in problems_of(lambda: (load_deepspeed_config if is_json else load_experiment)(path)):
        assert problem.fix
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        return
    read = ds_json if is_json else hyperparameters
    if problems := problems_of(lambda: read(text)):
        assert all(re.search(r"(ds\.json|hp\.yaml)(:\d+)*", str(problem)) for problem in problems)
        return
    document = read(text)
    assert json.loads(json.dumps(document.data, allow_nan=False)) == document.data
    if is_json:
        assert document.data == json.loads(text)
