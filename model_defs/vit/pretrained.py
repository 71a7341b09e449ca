"""A Hugging Face checkpoint by folder or by name: its configuration, and its weights under a head of ours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from determined_ds.errors import ConfigError, Problem

KEY = "hyperparameters.pretrained"
NUM_SHOWN = 5


def pretrained_config(source: str, *, model_type: str, sizes: Mapping[str, int] | None) -> dict[str, Any]:
    """What the checkpoint's ``config.json`` says.

    Args:
        source: A folder written by ``save_pretrained``, or a name on the Hugging Face hub.
        model_type: What it must be a checkpoint of, by Hugging Face's name.
        sizes: What ``model_size`` says its configuration is; None: no size was named.

    Raises:
        ConfigError: It cannot be read, is of another architecture or of another size.
    """
    _check_folder(source)
    try:
        config, _ = transformers.PretrainedConfig.get_config_dict(source)
    except Exception as error:  # What it raises differs by what is missing, broken or out of reach.
        raise _unloadable(source, error) from error
    found = config.get("model_type")
    if found != model_type:
        message = f"is a checkpoint of {found!r}, not of {model_type!r}."
        raise _error(source, message, f"a checkpoint of a {model_type}, or the trial of a {found}")
    default = vars(transformers.AutoConfig.for_model(model_type))
    others = {
        name: config.get(name, default.get(name))
        for name, size in (sizes or {}).items()
        if config.get(name, default.get(name)) != size
    }
    if others:
        there = ", ".join(f"{name} {value}" for name, value in others.items())
        here = ", ".join(f"{name} {(sizes or {})[name]}" for name in others)
        message = f"is of another size than hyperparameters.model_size: {there} there, {here} by that name."
        raise _error(source, message, "the model_size of the checkpoint; or model_size: null, which takes it")
    return dict(config)


def load_pretrained(kind: Any, source: str, config: Any, *, head: tuple[str, ...]) -> nn.Module:
    """A model with the checkpoint's weights; a head that the checkpoint lacks, or has of another shape, is new.

    Args:
        kind: The Hugging Face class.
        source: As for :func:`pretrained_config`.
        config: Of the model to build.
        head: Prefixes of the parameters that may be new.

    Raises:
        ConfigError: The weights cannot be read, or are missing or of other shapes outside the head.
    """
    _check_folder(source)
    try:
        with _quiet():
            model, info = kind.from_pretrained(
                source,
                config=config,
                ignore_mismatched_sizes=True,  # those outside the head are refused below
                output_loading_info=True,
                dtype=torch.float32,
            )
    except Exception as error:  # as above
        raise _unloadable(source, error) from error
    wrong = [f"{name} is missing" for name in sorted(info["missing_keys"]) if not name.startswith(head)]
    wrong += [
        f"{name} is {tuple(there)} there and {tuple(here)} in the model"
        for name, there, here in sorted(info["mismatched_keys"])
        if not name.startswith(head)
    ]
    if wrong:
        more = f"; and {len(wrong) - NUM_SHOWN} more" if len(wrong) > NUM_SHOWN else ""
        message = f"{len(wrong)} tensors do not fit: {'; '.join(wrong[:NUM_SHOWN])}{more}."
        raise _error(source, message, "save the checkpoint again, its weights and its config.json together")
    loaded: nn.Module = model
    return loaded


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without transformers' own report of what is new, which would be each rank's; what matters is refused."""
    logging = transformers.utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _check_folder(source: str) -> None:
    folder = Path(source).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fix = "a folder written by save_pretrained, with config.json and model.safetensors in it"
            raise _error(source, "the folder holds no config.json.", fix)
    elif folder.exists() or source.startswith(("/", ".", "~")):
        fix = "a folder that every slot can read, or a name on the Hugging Face hub"
        raise _error(source, "no such folder.", fix)


def _unloadable(source: str, error: Exception) -> ConfigError:
    reason = (str(error).strip() or type(error).__name__).splitlines()[0]
    return _error(
        source,
        f"Hugging Face cannot load it: {reason}",
        "a folder written by save_pretrained, or a name on the hub, if it can be reached",
    )


def _error(source: str, message: str, fix: str) -> ConfigError:
    return ConfigError(Problem(key=KEY, value=source, message=message, fix=fix, code="pretrained"))
