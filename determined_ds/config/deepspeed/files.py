"""DeepSpeed configurations as files: read and judged, judged and written."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from determined_ds.config.deepspeed.normalized import located_problems, normalized
from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.reading import read_json
from determined_ds.documents.values import kind_of
from determined_ds.documents.writing import write_files
from determined_ds.errors import ConfigError, Problem

# The keys that every template has, in the templates' order; all others follow as they stand.
FIRST_KEYS = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "zero_optimization",
    "optimizer",
    "scheduler",
    "gradient_clipping",
    "bf16",
    "fp16",
)


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, and refuse what DeepSpeed would not read in it.

    Args:
        path: Of the file. Only JSON: no comments, no commas at the end.

    Returns:
        A plain dict, ``"auto"`` where the file says so. Whole floats are integers where DeepSpeed takes
        integers (``5e8``), ``zero_optimization: true``, the oldest form, is stage 1, and old names that DeepSpeed
        still reads (``cpu_offload``, ``bfloat16``) are those of today.

    Raises:
        ConfigError: the file cannot be read, or is not JSON, or repeats a key, or has one that DeepSpeed does not
            know or reads as another type; all of them, each with its line.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and what it reads further.
    """
    document = read_json(Path(path))
    _refuse(located_problems(document))
    return normalized(document).data


def save_deepspeed_config(config: Mapping[str, Any], path: str | Path, *, overwrite: bool = False) -> None:
    """Write a DeepSpeed JSON, indented by two, so that the same configuration always gives the same bytes.

    Args:
        config: A DeepSpeed configuration; ``"auto"`` is kept. The keys of the project's templates come first,
            in the templates' order, all others as they stand.
        path: Of the file; its folder is made where it is missing.
        overwrite: Whether a file that is there is replaced.

    Raises:
        ConfigError: a key that DeepSpeed does not know (with the nearest that it does), a value that it reads as
            another type or that JSON cannot hold, a file that is there already, or one that cannot be written.

    Source: the keys are those of deepspeed 0.19.8's ``runtime/config.py`` and what it reads further.
    """
    text = deepspeed_config_text(config)
    write_files({Path(path): text}, overwrite=overwrite, permission="overwrite=True")


def deepspeed_config_text(config: Mapping[str, Any]) -> str:
    """The text of a DeepSpeed JSON. See :func:`save_deepspeed_config`."""
    if not isinstance(config, Mapping):
        message = f"must be a mapping, not {kind_of(config)}"
        fix = "save_deepspeed_config(config, path): the configuration comes first"
        raise ConfigError(Problem(key="config", value=config, message=message, fix=fix, code="wrong-type"))
    try:
        data = plain(config)
    except RecursionError:
        message, fix = "is nested too deep, or holds itself", "write plain values only"
        raise ConfigError(Problem(key="config", message=message, fix=fix, code="wrong-type")) from None
    document = Document(name="config", data=data)
    unwritable = list(_unwritable(document, (), data))
    _refuse(unwritable or located_problems(document))
    first = {key: data[key] for key in FIRST_KEYS if key in data}
    return json.dumps({**first, **data}, indent=2, ensure_ascii=False) + "\n"


def plain(value: Any) -> Any:
    """A deep copy in the types that JSON has: mappings are dicts, tuples lists, paths strings."""
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, os.PathLike) else value


def _refuse(located: Sequence[tuple[KeyPath, Problem]]) -> None:
    if located:
        raise ConfigError(problem for _, problem in located)


def _unwritable(document: Document, path: KeyPath, value: Any) -> Iterator[tuple[KeyPath, Problem]]:
    """What JSON has no form for."""
    message = ""
    if isinstance(value, dict):
        for key, item in value.items():
            if isinstance(key, str):
                yield from _unwritable(document, (*path, key), item)
            else:
                message = f"a key of JSON must be a string, not {key!r}"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _unwritable(document, (*path, index), item)
    elif isinstance(value, float) and not math.isfinite(value):
        message = "JSON has finite numbers only"
    elif value is not None and not isinstance(value, (str, bool, int, float)):
        message = f"JSON has no form for a {type(value).__name__}"
    if message:
        key, fix = (
            document.key(path) or "config",
            "write a string, a finite number, true, false, null or a list",
        )
        yield (), Problem(key=key, value=value, message=message, fix=fix, code="wrong-type")
