"""A Hugging Face checkpoint by folder or by name: its tokenizer, its weights, and what is wrong with it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers

from determined_ds.errors import ConfigError
from model_defs.common.sections import config_error, data_error

KEY = "hyperparameters.pretrained"
NUM_SHOWN = 5


def load_tokenizer(source: str, *, key: str = "data.tokenizer") -> Any:
    """A Hugging Face tokenizer, of a folder or by its name on the hub.

    Args:
        source: Folder or name.
        key: The configuration key that named it.

    Raises:
        DataError: It cannot be loaded, or is empty.
    """
    fix = "a folder written by the tokenizer's save_pretrained, a name on the hub such as gpt2, or bytes"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:  # What it raises differs by the file that is missing or broken.
        raise data_error(key, source, f"no tokenizer can be loaded: {first_line(error)}", fix) from error
    # transformers makes an empty tokenizer of a bare config.json.
    if len(tokenizer) <= len(set(tokenizer.all_special_ids)):
        raise data_error(key, source, "there is no vocabulary in it, only special tokens.", fix)
    return tokenizer


def export_generation_config(source: str, folder: Path) -> None:
    """Write into an export how the checkpoint that training started from generates, where it says so."""
    with contextlib.suppress(OSError):  # it has none
        transformers.GenerationConfig.from_pretrained(source).save_pretrained(folder)


def misfits(info: Mapping[str, Any], *, except_for: tuple[str, ...] = ()) -> str:
    """What a checkpoint lacks or has in another shape, which transformers would draw at random; "" for nothing.

    Args:
        info: What ``from_pretrained`` returns with ``output_loading_info``.
        except_for: Prefixes of the names that do not count.
    """
    wrong = {name: f"{name} is missing" for name in sorted(info["missing_keys"])}
    for name, there, here in sorted(info["mismatched_keys"]):
        wrong[name] = f"{name} has the shape {tuple(there)}, and {tuple(here)} in the model"
    said = [text for name, text in wrong.items() if not name.startswith(except_for)]
    return "; ".join(said[:NUM_SHOWN] + [f"and {len(said) - NUM_SHOWN} more"] * (len(said) > NUM_SHOWN))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' own bars and reports, which each rank would print; what matters is an error."""
    settings = transformers.utils.logging
    level, bars = settings.get_verbosity(), settings.is_progress_bar_enabled()
    settings.set_verbosity_error()
    settings.disable_progress_bar()
    try:
        yield
    finally:
        settings.set_verbosity(level)
        if bars:
            settings.enable_progress_bar()


def enable_activation_checkpointing(model: Any) -> None:
    """Compute each layer again in the backward pass instead of keeping what it computed.

    By torch's reentrant form: the other compares the shapes of parameters then and now, and ZeRO 3 takes parameters
    away in between.
    """
    # transformers renamed it within its fifth version.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": True})


def first_line(error: BaseException) -> str:
    """What an error says, in a line of at most 300 characters."""
    return " ".join((str(error).strip() or type(error).__name__).split("\n\n")[0].split())[:300]


def unloadable(source: str, error: Exception, key: str = KEY) -> ConfigError:
    """The error of a checkpoint that Hugging Face cannot load."""
    fix = "a folder written by save_pretrained that every slot can read, or a name on the hub, if it can be reached"
    return config_error(key, source, f"Hugging Face cannot load it: {first_line(error)}", fix)
