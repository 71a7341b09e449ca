"""Where a model is: a folder here, or a name on the Hugging Face hub. Checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from determined_ds.errors import ConfigError, Problem

KEY = "hyperparameters.model"
# For the hub to say whether it knows a name. Loading itself would try for half a minute.
TIMEOUT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Source:
    """What ``from_pretrained`` is to be given.

    Args:
        name: A folder, or a name on the hub.
        local_files_only: The hub cannot be reached, and what was downloaded earlier is taken.
    """

    name: str
    local_files_only: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``from_pretrained``."""
        return {"local_files_only": True} if self.local_files_only else {}


def locate(name: Any) -> Source:
    """Find a model's folder or its name on the hub; nothing is loaded.

    Args:
        name: A folder written by ``save_pretrained``, or a name on the hub such as ``Qwen/Qwen3-0.6B``.

    Raises:
        ConfigError: It is neither, or the hub cannot be reached and nothing of it was downloaded before.
    """
    if not isinstance(name, str) or not name:
        message = "must be a folder, or a name on the hub."
        raise model_error(KEY, name, message, "model: Qwen/Qwen3-0.6B")
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            fix = "a folder that save_pretrained has written"
            raise model_error(KEY, name, "the folder holds no config.json.", fix)
        return Source(name=str(folder))
    if folder.exists():
        raise model_error(KEY, name, "is a file.", "the folder that holds config.json and the weights")
    if name.startswith(("/", ".", "~")) or name.count("/") > 1:
        message = f"no such folder, seen from {os.getcwd()}."
        fix = "a folder that every slot can read, or a name on the hub such as Qwen/Qwen3-0.6B"
        raise model_error(KEY, name, message, fix)
    return _on_the_hub(name)


def _on_the_hub(name: str) -> Source:
    import huggingface_hub as hub
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        hub.model_info(name, timeout=TIMEOUT_S)
        return Source(name=name)
    except GatedRepoError as gated:
        error: Exception = gated
        message = "no such folder here, and on the Hugging Face hub it is gated: your token may not read it."
        fix = f"accept its terms on https://huggingface.co/{name}, and set HF_TOKEN on every slot"
    except (RepositoryNotFoundError, HFValidationError) as unknown:
        error = unknown
        message = "no such folder here, and no such name on the Hugging Face hub (or a private one)."
        fix = "a folder that every slot can read, or OWNER/NAME as the hub spells it; HF_TOKEN where it is private"
    except Exception as other:  # no network, a proxy, HF_HUB_OFFLINE
        if isinstance(hub.try_to_load_from_cache(name, "config.json"), str):
            return Source(name=name, local_files_only=True)
        error, kind = other, type(other).__name__
        message = f"no such folder here, the Hugging Face hub cannot be reached ({kind}), and no download is cached."
        fix = (
            "a folder that every slot can read; or download it where there is a network "
            f"(hf download {name} --local-dir FOLDER) and name that folder"
        )
    raise model_error(KEY, name, message, fix) from error


def model_error(key: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of one hyperparameter that names or sizes the model."""
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix))
