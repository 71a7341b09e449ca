"""The blocks of code in the READMEs, CONTRIBUTING.md and docs/, and a context directory with the files among them.

A block whose first line is a comment with a path is a file of that name.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "experiments/README.md",
    *sorted((ROOT / "docs").glob("*.md")),
]


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block."""

    page: Path
    language: str
    text: str
    file: str


def blocks_of(page: Path) -> Iterator[Block]:
    for language, text in re.findall(r"^```(\w+)\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
        named = re.match(r"# ([\w/]+\.\w+)\n", text)
        yield Block(
            page=page,
            language=language,
            text=text[named.end() :] if named else text,
            file=named[1] if named else "",
        )


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
FILES = {block.file: block.text for block in BLOCKS if block.file}


def context_of(folder: Path) -> Path:
    """A context directory with our experiments and models, and the files that the pages have."""
    for name in ("experiments", "model_defs", "launch"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".detignore", folder)
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder
