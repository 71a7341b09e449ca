"""NAME and kind -> the files of a new model and its experiment, which run as they are."""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from determined_ds.config.create import create_deepspeed_config, deepspeed_config_text
from determined_ds.errors import ConfigError, Problem

KINDS = ("data-parallel", "pipeline", "two-engine")
TEMPLATES = Path(__file__).parent
PACKAGE = "model_defs/__init__.py"


@dataclass(frozen=True, kw_only=True)
class NewFiles:
    """Path in the context directory -> text.

    Args:
        own: Files of the new model.
        shared: Files that other models use too; one that exists is kept.
    """

    own: dict[str, str]
    shared: dict[str, str]


def files_of(name: str, kind: str) -> NewFiles:
    """The files of a new model, from the templates.

    Args:
        name: Of the folder in ``model_defs``, a Python name; the class is named after it.
        kind: One of :data:`KINDS`.

    Raises:
        ConfigError: the name is not a valid package name.
    """
    check_name(name)
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    own = {f"model_defs/{name}/__init__.py": ""}
    texts = {text.name: text for of in ("common", kind) for text in sorted((TEMPLATES / of).glob("*.txt"))}
    for text in texts.values():
        folder = f"experiments/{name}" if ".yaml" in text.name else f"model_defs/{name}"
        content = Template(text.read_text(encoding="utf-8")).substitute(words)
        own[f"{folder}/{text.name.removesuffix('.txt')}"] = content
    pipeline = kind == "pipeline"
    ds_config = create_deepspeed_config(zero_stage=0 if pipeline else 1, scheduler=None)
    path = f"experiments/deepspeed/{'pipeline' if pipeline else 'zero1'}.json"
    return NewFiles(own=own, shared={PACKAGE: "", path: deepspeed_config_text(ds_config)})


def check_name(name: str) -> None:
    """Refuse what is not a valid package name."""
    if re.fullmatch("[a-z][a-z0-9_]*", name) and not keyword.iskeyword(name):
        return
    suggestion = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_") or "my_model"
    if not suggestion[0].isalpha() or keyword.iskeyword(suggestion):
        suggestion = f"model_{suggestion}"
    message = "is not a valid package name: it must be lower-case letters, digits and _, a letter first"
    raise ConfigError(Problem(key="NAME", value=name, message=message, fix=f"use {suggestion}", code="name"))
