"""One HTML file that loads nothing: its template, its colours on light and dark, its script under a digest."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from determined_ds.report.style import FONTS, GRID, GROUND, INK, MUTED, PALETTE

HERE = Path(__file__).parent
LIGHT = {"ink": INK, "muted": MUTED, "grid": GRID, "ground": GROUND, "page": "#f5f7f9", "accent": "#0b5cad"}
DARK = {
    "ink": "#e8ebef",
    "muted": "#a3adb8",
    "grid": "#39424d",
    "ground": "#1a2027",
    "page": "#11161b",
    "accent": "#7ab8f5",
}


def self_contained(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page. What is in the values is text, unless it is markup of our own.

    Args:
        template: Its file, below this folder.
        scripts: Files that run on the page, one after the other; nothing else may.
        values: For the template.
    """
    script = "\n".join((HERE / name).read_text(encoding="utf-8").rstrip("\n") for name in scripts) + "\n"
    environment = Environment(
        loader=FileSystemLoader(HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        light=_variables(LIGHT, dark=False),
        dark=_variables(DARK, dark=True),
        fonts=Markup(FONTS),
        num_colours=len(PALETTE),
        **values,
    )


def _variables(page: dict[str, str], *, dark: bool) -> Markup:
    palette = {f"s{index}": pair[dark] for index, pair in enumerate(PALETTE)}
    return Markup(" ".join(f"--{name}: {colour};" for name, colour in {**page, **palette}.items()))
