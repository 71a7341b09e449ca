"""Whatever is done to a text, it is read, or refused with its place: never a traceback, never a hang."""

from __future__ import annotations

import json
import re
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from determined_ds.documents.reading import read_json, read_yaml
from determined_ds.errors import ConfigError
from tests.making import DS_CONFIGS, EXPERIMENTS

WORDS = [
    b"<<: ",
    b"&a ",
    b"*a",
    b"1e999",
    b"!!int ",
    b"- ",
    b"? ",
    b"...\n",
    b"---\n",
    b"NaN",
    b"//",
    b"9" * 80,
]
ENCODED = [b"\xff", b"\xc3", b"\xef\xbb\xbf", b"\xed\xa0\x80", b"\\u0000", b'"\\ud800"']
SIGNS = [bytes([sign]) for sign in b"\0\t\n\r :-#&*!|>'\"%@`{}[],?<=~."]
SNIPPETS = [*SIGNS, *WORDS, *ENCODED]
POSITIONS = st.floats(0, 1, exclude_max=True)
EDITS = st.tuples(
    st.sampled_from(["flip", "cut", "insert", "copy"]), POSITIONS, POSITIONS, st.sampled_from(SNIPPETS)
)


def mutated(text: bytes, edits: list[tuple[str, float, float, bytes]]) -> bytes:
    for kind, one, other, snippet in edits:
        start, end = sorted((int(one * len(text)), int(other * len(text))))
        if kind == "flip":
            text = text[:start] + snippet + text[start + len(snippet) :]
        elif kind == "cut":
            text = text[:start] + text[min(end, start + 40) :]
        elif kind == "insert":
            text = text[:start] + snippet + text[start:]
        else:
            text = text[:end] + text[start : start + 40] + text[end:]
    return text


@given(source=st.sampled_from([*EXPERIMENTS, *DS_CONFIGS]), edits=st.lists(EDITS, min_size=1, max_size=5))
def test_whatever_is_done_to_a_text_it_is_read_or_refused_with_its_place(
    source: Path, edits: list[tuple[str, float, float, bytes]], tmp_path: Path
) -> None:
    """And what is read can be told again: it is plain JSON."""
    content = mutated(source.read_bytes(), edits)
    path = tmp_path / source.name
    path.write_bytes(content)
    read = read_yaml if source.suffix == ".yaml" else read_json
    try:
        document = read(path, name="f")
    except ConfigError as error:
        for problem in error.problems:
            assert re.match(r"f(:\d+:\d+)?$|.*\(f:\d+\)", str(problem).split(":  ")[0].split(": ")[0])
            assert problem.fix
        return
    told = json.loads(json.dumps(document.data, allow_nan=False))
    assert told == document.data
    if source.suffix == ".json":
        assert document.data == json.loads(content.decode("utf-8-sig"))
    for key in document.places:
        assert document.get(key, "missing") != "missing"
