"""YAML and JSON are read whole, with every place, or refused with a place: never a traceback, never a hang."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.reading import (
    MAX_BYTES,
    dump_yaml,
    parse_json,
    parse_yaml,
    parse_yaml_value,
    read_json,
    read_yaml,
)
from determined_ds.documents.yaml_text import MAX_NODES
from tests.making import DS_CONFIGS, EXPERIMENTS, refusal, refusals

KEYS = st.text("abcdefé_XYZ", min_size=1, max_size=6)
SCALARS = (
    st.booleans() | st.integers(-(10**9), 10**9) | st.floats(-1e9, 1e9) | st.text("ab :#'\"\\é\n", max_size=6)
)
DATA = st.dictionaries(
    KEYS,
    st.recursive(
        SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_size=4,
)


# ------------------------------------------------------------------------------------- what is read, and where


def at(text: str, document: Document, path: KeyPath) -> str:
    """The text from the place of a key on."""
    place = document.places[path]
    return text.split("\n")[place.line - 1][place.column - 1 :]


def keys(data: Any, path: KeyPath = ()) -> list[KeyPath]:
    """The path of every key below, those in lists included."""
    found = []
    if isinstance(data, dict):
        found = [(*path, key) for key in data]
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    return found + [inner for key, value in items for inner in keys(value, (*path, key))]


@given(DATA, st.sampled_from([None, 2]))
def test_json_is_read_with_every_place(data: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(data, indent=indent, ensure_ascii=False)
    document = parse_json(text, "a.json")
    assert document.data == data
    for path in keys(data):
        assert at(text, document, path).startswith(json.dumps(path[-1], ensure_ascii=False))


@given(DATA, st.sampled_from([None, True, False]))
def test_yaml_is_read_with_every_place(data: dict[str, Any], flow: bool | None) -> None:
    text = yaml.safe_dump(data, default_flow_style=flow, allow_unicode=True)
    document = parse_yaml(text, "a.yaml")
    assert document.data == data
    for path in keys(data):
        assert re.match(rf"[\"'?]? ?{path[-1]}", at(text, document, path))


NUMERALS = st.text("0123456789eE.:_-+xob", max_size=6)


@given(st.dictionaries(NUMERALS | KEYS, NUMERALS | SCALARS | st.lists(NUMERALS), max_size=4))
def test_what_is_written_is_read_back(data: dict[str, Any]) -> None:
    """Also a string that looks like a number to one parser only: a revision "7e12345" stays a string."""
    assert parse_yaml(dump_yaml(data), "a.yaml").data == data


@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_experiments_mean_what_they_mean_to_determined(path: Path) -> None:
    from determined.common.util import yaml_safe_load

    assert read_yaml(path).data == yaml_safe_load(path.read_text())


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_deepspeed_configs_mean_what_they_mean_to_python(path: Path) -> None:
    assert read_json(path).data == json.loads(path.read_text())


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1E5", 1e5),
        ("-2e+05", -2e5),
        (".5e3", 500.0),
        ("+.5", 0.5),
        ("1.", 1.0),
        ("1_000", 1000),
        ("0x1f", 31),
        ("0o17", 15),
        ("0b11", 3),
        ("017", 15),
        ("08", 8),
        ("-0", 0),
        ("1:30", "1:30"),
        ("190:20:30.15", "190:20:30.15"),
        ("2024-01-01", "2024-01-01"),
        ("2024-01-01T00:00:00Z", "2024-01-01T00:00:00Z"),
        ("1e", "1e"),
        ("e5", "e5"),
        (".", "."),
        ("-", ["-"]),
        ("yes", True),
        ("off", False),
        ("~", None),
        ("", None),
        ("=", "="),
        ("'1e-3'", "1e-3"),
        ("!!str 12", "12"),
        ("!!float 1", 1.0),
    ],
)
def test_a_scalar_is_what_the_master_takes_it_for(text: str, value: Any) -> None:
    """The master parses with Go's library: a number needs no dot, and times and dates are strings."""
    if text == "-":
        text, value = "- '-'", ["-"]
    read = parse_yaml(f"a:\n  {text}", "a.yaml").data["a"]
    assert read == value
    assert type(read) is type(value)


def test_anchors_are_copied_and_merges_filled() -> None:
    text = """base: &base {x: 1, y: [1, 2]}
own: &own
  y: own
  <<: *base
first_wins:
  <<: [*own, *base]
more:
  <<: *base
  z: 3
copy: *base
"""
    document = parse_yaml(text, "a.yaml")
    assert document.data["own"] == document.data["first_wins"] == {"x": 1, "y": "own"}
    assert document.data["more"] == {"x": 1, "y": [1, 2], "z": 3}
    assert document.origin(("own", "x")) == "a.yaml:1"
    assert document.origin(("own", "y")) == "a.yaml:3"
    document.data["copy"]["y"].append(3)
    assert document.data["base"]["y"] == [1, 2]


def test_a_merge_seen_twice_is_no_repetition() -> None:
    text = "base: &base {x: 1}\nown: &own {<<: *base, x: 2}\nagain: *own\n"
    assert parse_yaml(text, "a.yaml").data["again"] == {"x": 2}


def test_keys_are_words_whatever_they_look_like() -> None:
    assert parse_yaml("1: a\ntrue: b\n~: c\n1e3: d\n", "a").data == {
        "1": "a",
        "true": "b",
        "~": "c",
        "1e3": "d",
    }


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"\xef\xbb\xbfname: x\n")
    (tmp_path / "a.json").write_bytes(b'\xef\xbb\xbf{"name": "x"}')
    assert read_yaml(tmp_path / "a.yaml").data == read_json(tmp_path / "a.json").data == {"name": "x"}


def test_windows_line_ends_count_as_one(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_bytes(b"a: 1\r\nb: 2\r\n")
    (tmp_path / "a.json").write_bytes(b'{"a": 1,\r\n"b": 2}')
    for document in (read_yaml(tmp_path / "a.yaml", name="f"), read_json(tmp_path / "a.json", name="f")):
        assert document.origin(("b",)) == "f:2"


# ------------------------------------------------------------------------------------------- what is refused


def test_a_repeated_key_is_told_with_both_lines() -> None:
    for problem in (
        refusal(lambda: parse_yaml("a:\n  b: 1\n  c: 2\n  b: 3\n", "f")),
        refusal(lambda: parse_json('{"a": {\n"b": 1,\n"c": 2,\n"b": 3}}', "f")),
    ):
        first, again = (2, 4)
        assert (
            str(problem)
            == f"a.b (f:{again}): given twice, on lines {first} and {again}\n  fix: keep one of them"
        )


def test_all_repeated_keys_are_told() -> None:
    assert (
        len(refusals(lambda: parse_json('{"a": 1, "b": 1, "a": 2, "b": 2, "c": {"d": 1, "d": 1}}', "f"))) == 3
    )
    assert len(refusals(lambda: parse_yaml("a: 1\nb: 1\na: 2\nb: 2\n", "f"))) == 2


def test_two_merges_are_one_list() -> None:
    text = "a: &a {x: 1}\nb: &b {y: 1}\nc:\n  <<: *a\n  <<: *b\n"
    assert "[*a, *b]" in refusal(lambda: parse_yaml(text, "f")).fix


# What is wrong -> YAML, its place, what is said of it, what fixes it.
BROKEN_YAML = {
    "tab": ("a:\n\tb: 1", "2:1", "is not YAML", "spaces"),
    "tab-before-key": ("a:\n  b: 1\n \tc: 1", "3", "is not YAML", "spaces"),
    "colon": ("a: b: c", "1:5", "mapping values", "quotes"),
    "unclosed": ("\na: [1, 2\nb: 3", "3:2", "begins on line 2", "fix"),
    "unknown-anchor": ("a: *b", "1:4", "undefined alias", "&name"),
    "anchor-twice": ("a: &a 1\nb: &a 2", "2:4", "defined twice", "another name"),
    "merge-of-a-number": ("a: {<<: 1}", "1:9", "merges mappings", "*anchor"),
    "merge-of-numbers": ("a: {<<: [1]}", "1:10", "merges mappings", "*anchor"),
    "list-as-key": ("? [a]\n: 1", "1:3", "plain word", "key: value"),
    "two-documents": ("a: 1\n---\nb: 2", "2:1", "another document", "---"),
    "null-character": ("a: 1\nb: \0", "2:4", "U+0000", "UTF-8"),
    "surrogate": ("a: \udcff", "1:4", "U+DCFF", "UTF-8"),
    "infinity": ("a: .inf", "1:4", "not a finite number", "finite"),
    "nan": ("a: [1, .nan]", "1:8", "not a finite number", "finite"),
    "too-large-a-float": ("a: 1e999", "1:4", "not a finite number", "finite"),
    "too-large-an-integer": ("a: " + "9" * 5000, "1:4", "64 bits", "smaller"),
    "too-large-in-hex": ("a: 0x" + "f" * 5000, "1:4", "64 bits", "smaller"),
    "no-bool": ("a: !!bool x", "1:4", "'x' is not a valid bool", "plain"),
    "no-int": ("a: !!int ''", "1:4", "'' is not a valid int", "plain"),
    "no-float": ("a: !!float x", "1:4", "'x' is not a valid float", "plain"),
    "binary": ("a: !!binary YQ==", "1:4", "means nothing", "plain"),
    "timestamp": ("a: !!timestamp foo", "1:4", "means nothing", "plain"),
    "set": ("a: !!set {b, c}", "1:4", "means nothing", "plain"),
    "python": ("a: !!python/object/apply:os.system [ls]", "1:4", "means nothing", "plain"),
    "own-tag": ("a: !mine 1", "1:4", "means nothing", "plain"),
    "scalar": ("just words", "", "not a mapping", "name: ..."),
    "list": ("- a", "", "not a mapping", "name: ..."),
    "empty": ("", "", "is empty", "write"),
    "comment": ("# nothing\n", "", "is empty", "write"),
}


@pytest.mark.parametrize(("text", "place", "said", "fix"), BROKEN_YAML.values(), ids=BROKEN_YAML.keys())
def test_broken_yaml(text: str, place: str, said: str, fix: str) -> None:
    problem = refusal(lambda: parse_yaml(text, "f.yaml"))
    assert problem.origin.startswith(f"f.yaml:{place}" if place else "f.yaml")
    assert said in problem.message
    assert fix in problem.fix


BROKEN_JSON = {
    "comment": ('{\n  // no\n  "a": 1}', "2:3", "is not JSON", "no comments"),
    "hash": ('{"a": 1}\n# no', "2:1", "is not JSON", "no comments"),
    "trailing-comma": ('{"a": 1,\n}', "", "is not JSON", "remove the comma"),
    "trailing-comma-in-list": ('{"a": [1,]}', "1:", "is not JSON", "remove the comma"),
    "single-quotes": ("{'a': 1}", "1:2", "is not JSON", "double quotes"),
    "python-true": ('{"a": True}', "1:7", "is not JSON", "write true"),
    "python-none": ('{"a": None}', "1:7", "is not JSON", "write null"),
    "missing-comma": ('{"a": 1\n"b": 2}', "2:1", "is not JSON", "fix"),
    "cut": ('{"a": {"b"', "1:11", "is not JSON", "fix"),
    "two-values": ("{} {}", "1:4", "is not JSON", "fix"),
    "nan": ('{"a": NaN}', "1:7", "NaN is not JSON", "finite"),
    "minus-infinity": ('{"a": -Infinity}', "1:7", "-Infinity is not JSON", "finite"),
    "too-large-a-float": ('{"a": 1e999}', "1:7", "1e999 is not a finite number", "finite"),
    "too-large-an-integer": ('{"a": ' + "9" * 100 + "}", "1:7", "64 bits", "smaller"),
    "endless-integer": ('{"a": ' + "9" * 5000 + "}", "1:7", "", "smaller"),
    "deep-list": ('{"a": ' + "[" * 100_000, "", "deeper", "configuration"),
    "deep-mapping": ('{"a": ' * 500 + "1" + "}" * 500, "1:", "deeper", "configuration"),
    "list": ("[]", "", "not a JSON object", "{"),
    "empty": (" \n", "", "is empty", "{}"),
}


@pytest.mark.parametrize(("text", "place", "said", "fix"), BROKEN_JSON.values(), ids=BROKEN_JSON.keys())
def test_broken_json(text: str, place: str, said: str, fix: str) -> None:
    problem = refusal(lambda: parse_json(text, "f.json"))
    assert problem.origin.startswith(f"f.json:{place}" if place else "f.json")
    assert said in problem.message
    assert fix in problem.fix


def laughs(first: str, each: str, levels: int) -> str:
    """Anchors, each of which holds the one before ten times."""
    text = f"a0: &a0 {first}\n"
    for level in range(1, levels):
        text += f"a{level}: &a{level} " + each.format(",".join([f"*a{level - 1}"] * 10)) + "\n"
    return text


# Small texts of which a naive reader makes what fits in no memory, and large ones.
ENDLESS = {
    "billion-laughs": laughs("[lol]", "[{}]", 30),
    "laughing-mappings": laughs("{x: 1}", "{{k: [{}]}}", 30),
    "anchor-in-itself": "a: &a\n  b: *a\n",
    "anchor-in-its-list": "a: &a [*a]\n",
    "merge-of-itself": "a: &a\n  <<: *a\n",
    "merges-that-add-up": "a: &a {"
    + ", ".join(f"k{n}: 1" for n in range(1000))
    + "}\nb:\n"
    + "- <<: *a\n" * 1000,
    "chain-of-merges": "a:\n- &a0 {x: 1}\n"
    + "".join(f"- &a{n + 1} {{<<: *a{n}}}\n" for n in range(5000))
    + "<<: *a5000\n",
    "deep-flow": "a: " + "[" * 100_000,
    "deep-block": "\n".join(" " * n + "a:" for n in range(1000)),
    "many-values": "a: [" + "1," * MAX_NODES + "]",
}


@pytest.mark.parametrize("text", ENDLESS.values(), ids=ENDLESS.keys())
def test_yaml_that_grows_is_refused(text: str) -> None:
    problem = refusal(lambda: parse_yaml(text, "f.yaml"))
    assert re.match(r"f\.yaml:\d+:\d+$", problem.origin)
    assert re.search(r"without end|deeper|over \d+ values", problem.message)


def test_merges_alone_do_not_grow() -> None:
    """Ten times the same mapping, merged, is that mapping."""
    assert parse_yaml(laughs("{x: 1}", "{{<<: [{}]}}", 50), "f").data["a49"] == {"x": 1}


def test_large_json_is_refused() -> None:
    text = '{"a": [' + "1," * MAX_NODES + "1]}"
    assert "values" in refusal(lambda: parse_json(text, "f.json")).message


def test_a_value_of_the_command_line_is_refused_by_its_name() -> None:
    assert refusal(lambda: parse_yaml_value("[1", "--set a")).origin.startswith("--set a:")
    assert refusal(lambda: parse_yaml_value("\udcff", "--set a")).origin == "--set a:1:1"


# ---------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("read", [read_yaml, read_json])
class TestFiles:
    def test_missing(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "const.yaml").touch()
        problem = refusal(lambda: read(tmp_path / "cnst.yaml"))
        assert problem.message == "no such file"
        assert "const.yaml" in problem.fix
        assert "const.yaml" in refusal(lambda: read(tmp_path / "no" / "such" / "folder.yaml")).fix

    def test_missing_where_only_folders_below_have_some(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "experiments" / "gpt2").mkdir(parents=True)
        (tmp_path / "experiments" / "gpt2" / "const.yaml").touch()
        (tmp_path / ".hooks.yaml").touch()
        fix = refusal(lambda: read(tmp_path / "const.yaml")).fix
        assert fix == f"in {tmp_path} there is: experiments/gpt2/const.yaml"

    def test_stdin_by_its_usual_name(self, read: Any) -> None:
        assert "stdin is not read" in refusal(lambda: read(Path("-"))).fix

    def test_folder(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "const.yaml").touch()
        problem = refusal(lambda: read(tmp_path, name="folder"))
        assert (problem.origin, problem.message) == ("folder", "is a folder, not a file")
        assert "const.yaml" in problem.fix

    def test_pipe_or_device(self, read: Any, tmp_path: Path) -> None:
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", Path("/dev/zero")):
            assert "not a file" in refusal(lambda path=path: read(path)).message

    @pytest.mark.parametrize("content", [b"\xff\xfea\x00", b"a: \xe9", bytes(range(128, 256))])
    def test_not_utf_8(self, read: Any, content: bytes, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b"\n" + content)
        problem = refusal(lambda: read(tmp_path / "f", name="f"))
        assert problem.origin.startswith("f:2:")
        assert "UTF-8" in problem.message

    def test_empty(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        assert refusal(lambda: read(tmp_path / "f")).message == "is empty"

    def test_too_large(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "f").write_bytes(b" " * (MAX_BYTES + 1))
        assert "larger than 4 MiB" in refusal(lambda: read(tmp_path / "f")).message

    @pytest.mark.parametrize("name", ["a\0b", "a" * 5000, "f/below-a-file", "loop"])
    def test_no_path(self, read: Any, name: str, tmp_path: Path) -> None:
        (tmp_path / "f").touch()
        (tmp_path / "loop").symlink_to(tmp_path / "loop")
        assert "cannot be read" in refusal(lambda: read(tmp_path / name)).message

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
    def test_unreadable(self, read: Any, tmp_path: Path) -> None:
        (tmp_path / "f").touch(mode=0)
        assert "cannot be read" in refusal(lambda: read(tmp_path / "f")).message
