"""Plain technical English: the words and turns that messages, docstrings, comments and documents do without.

docs/contributing.md says how to write instead. A word is allowed where its pattern does not match: "there is no file".
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
# Pattern -> what to write.
OUT = {
    r"mend(?:s|ed|ing)?": "fix",
    r"spoil(?:s|t|ed)?": "damaged, scrambled, invalid",
    r"told|tells": "reported, said, shows",
    r"(?<!there )(?:is|are) no (?!longer\b|more\b)": "is not a valid ...",
    r"of one's own": "your own",
    r"the very": "the exact, the same",
    r"whoever": "the process that, the user who",
    r"nobody|somebody": "no process, another process, a user",
    r"not looked at": "ignored",
    r"la(?:id|y|ys|ying) over": "overlaid, overwritten by",
    r"la(?:id|y|ys|ying) aside": "kept, renamed",
    r"said again": "repeated",
    r"go(?:es|ing|ne)? on(?! (?:a|the) )|went on": "resume, continue",
    r"of a cluster": "on a cluster, cluster's",
    r"a start(?= (?:of|that|which|may|can|must|is|with)\b)": "a launch, a run",
    r"what (?:was|is) asked": "what was requested",
}
# Words may be on two lines.
PATTERN = re.compile("|".join(rf"\b(?:{pattern})\b" for pattern in OUT).replace(" ", r"\s"), re.IGNORECASE)

PLACES = {
    **{
        f"determined_ds/{path.name}": path
        for path in sorted((ROOT / "determined_ds").iterdir())
        if path.suffix == ".py" or (path.is_dir() and path.name != "__pycache__")
    },
    "model_defs": ROOT / "model_defs",
    "experiments": ROOT / "experiments",
    "docs": ROOT / "docs",
    "README.md": ROOT / "README.md",
    "CONTRIBUTING.md": ROOT / "CONTRIBUTING.md",
    "CHANGELOG.md": ROOT / "CHANGELOG.md",
}


def texts_of_python(source: str) -> Iterator[tuple[int, str]]:
    """Line -> a string, a docstring or a comment."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    if path.suffix == ".py":
        yield from texts_of_python(path.read_text())
    else:
        yield 1, path.read_text()


def findings(place: Path) -> list[str]:
    """Each use of a word that is out, as ``file:line: word``."""
    files = [place] if place.is_file() else sorted(place.rglob("*"))
    return [
        f"{path.relative_to(ROOT)}:{line + text.count(chr(10), 0, found.start())}: {found[0]!r}"
        for path in files
        if path.suffix in {".py", ".md", ".yaml", ".txt", ".j2", ".html", ".css"}
        for line, text in texts_of(path)
        for found in PATTERN.finditer(text)
    ]


@pytest.mark.parametrize("place", PLACES)
def test_words_that_are_out_are_not_used(place: str) -> None:
    assert findings(PLACES[place]) == []


@pytest.mark.parametrize(
    ("text", "is_out"),
    [
        ("the run is told to stop", True),
        ("a file that\nis no experiment", True),
        ("there is no checkpoint", False),
        ("it is no longer there", False),
        ("a recommended value", False),
        ("the training goes on", True),
    ],
)
def test_a_word_is_found_where_it_is_meant(text: str, is_out: bool) -> None:
    assert bool(PATTERN.search(text)) == is_out
