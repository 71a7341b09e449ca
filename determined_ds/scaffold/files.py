"""NAME and kind -> the files of a model and its experiment, which run as they are."""

from __future__ import annotations

import json
import keyword
import re
from pathlib import Path
from string import Template

from determined_ds.config.deepspeed.create import create_deepspeed_config
from determined_ds.config.deepspeed.files import deepspeed_config_text
from determined_ds.errors import ConfigError, Problem

KINDS = ("data-parallel", "pipeline", "two-engine")
TEXTS = Path(__file__).parent
JSONS = {
    "data-parallel": "experiments/deepspeed/zero1.json",
    "pipeline": "experiments/deepspeed/pipeline.json",
    "two-engine": "experiments/deepspeed/zero1.json",
}


def files_of(name: str, kind: str) -> dict[str, str]:
    """The files of a new model.

    Args:
        name: Of the folder in ``model_defs``, a Python name; the class is made from it.
        kind: One of :data:`KINDS`.

    Returns:
        Path in the context directory -> text.

    Raises:
        ConfigError: the name is none that Python can import.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        suggestion = re.sub("[^a-z0-9]+", "_", name.lower()).strip("_") or "my_model"
        if not suggestion[0].isalpha() or keyword.iskeyword(suggestion):
            suggestion = f"model_{suggestion}"
        raise ConfigError(
            Problem(
                key="NAME",
                value=name,
                message="is no name of a Python package: small letters, digits and _, a letter first",
                fix=f"use {suggestion}",
                code="name",
            )
        )
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    files = {f"model_defs/{name}/__init__.py": ""}
    texts = {
        text.name: text for folder in ("common", kind) for text in sorted((TEXTS / folder).glob("*.txt"))
    }
    for text in texts.values():
        folder = f"experiments/{name}" if ".yaml" in text.name else f"model_defs/{name}"
        content = Template(text.read_text(encoding="utf-8")).substitute(words)
        files[f"{folder}/{text.name.removesuffix('.txt')}"] = content
    return files


def deepspeed_json_of(kind: str) -> tuple[str, str]:
    """Path and text of the DeepSpeed JSON that a kind's experiment names; it may be there already."""
    config = create_deepspeed_config(zero_stage=0 if kind == "pipeline" else 1, scheduler=None)
    assert json.loads(deepspeed_config_text(config)) == config
    return JSONS[kind], deepspeed_config_text(config)
