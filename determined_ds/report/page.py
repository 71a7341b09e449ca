"""One HTML file that loads nothing: its template, its colours, its script under a digest."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from determined_ds.report.style import FONTS, GRID, GROUND, INK, MUTED, PALETTE

ASSETS = Path(__file__).parent / "assets"
COLOURS = {"ink": INK, "muted": MUTED, "grid": GRID, "ground": GROUND, "page": "#f5f7f9", "accent": "#0b5cad"}


def self_contained(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page. What is in the values is text, unless it is markup of our own.

    Args:
        template: Its file, below :data:`ASSETS`.
        scripts: Files that run on the page, one after the other; nothing else may.
        values: For the template.
    """
    script = "\n".join((ASSETS / name).read_text(encoding="utf-8").rstrip("\n") for name in scripts) + "\n"
    colours = {**COLOURS, **{f"s{index}": colour for index, colour in enumerate(PALETTE)}}
    environment = Environment(
        loader=FileSystemLoader(ASSETS),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=Markup(" ".join(f"--{name}: {colour};" for name, colour in colours.items())),
        fonts=Markup(FONTS),
        num_colours=len(PALETTE),
        **values,
    )


def can_draw() -> bool:
    """Whether matplotlib is there, which draws pictures."""
    return importlib.util.find_spec("matplotlib") is not None
