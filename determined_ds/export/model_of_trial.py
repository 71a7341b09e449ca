"""The Hugging Face model that a trial trains, without values: its class, its configuration, its tensors' names.

It is built on the meta device, by the trial of the checkpoint; or from the config.json of a folder.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from determined_ds.errors import CheckpointError, ConfigError, DeterminedDSError, Problem
from determined_ds.export.matching import Expected
from determined_ds.runtime.load_model import own_code_of, trial_in
from determined_ds.runtime.shapes.bare_trial import inside
from determined_ds.runtime.upstream import only_errors

FIX = "--config FOLDER, with the config.json of the Hugging Face model; or --to safetensors"


@dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """What a checkpoint is of.

    Args:
        kind: The class of transformers.
        config: Its configuration.
        model: One on the meta device, of ``kind``.
        adapted: The same as the trial builds it, a ``peft.PeftModel``; None where it has no adapters.
        prefix: Of the names of ``adapted`` in the trial's model.
        trial: Which writes more files; None where there is none.
    """

    kind: Any
    config: Any
    model: Any
    adapted: Any = None
    prefix: str = ""
    trial: Any = None

    @property
    def expected(self) -> Expected:
        """Its tensors, as from_pretrained wants them."""
        names: dict[int, list[str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        tensors = self.model.state_dict(keep_vars=True)
        for name, tensor in tensors.items():
            names.setdefault(id(tensor), []).append(name)
            if names[id(tensor)][0] == name:
                shapes[name] = tuple(tensor.shape)
        return Expected(shapes=shapes, tied={first: tuple(rest) for first, *rest in names.values() if rest})


@contextlib.contextmanager
def model_of_trial(path: Path, context_dir: Path, *, own_code: bool) -> Iterator[TrainedModel]:
    """The Hugging Face model of a checkpoint's trial; inside, its code can be called.

    Args:
        path: The checkpoint's folder.
        context_dir: With the code of the trial.
        own_code: Whether the code in the checkpoint is taken in place of it.

    Raises:
        ConfigError: the trial cannot be built, or its model is none of transformers'.
    """
    with inside(own_code_of(path) if own_code else context_dir):
        try:
            trial = trial_in(path)
        except CheckpointError as error:  # it was written by a script, or does not say by what
            raise _unknown(str(error).splitlines()[0]) from None
        yield _of_trial(trial)


def _of_trial(trial: Any) -> TrainedModel:
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    config = trial.huggingface_config()
    if config is not None:
        return replace(_of_config(config, type(trial).__name__), trial=trial)
    name = type(trial).__name__
    if isinstance(trial, PipelineTrial):
        raise _unknown(f"{name} builds a pipeline, and has no huggingface_config")
    try:
        with torch.device("meta"), only_errors("transformers"):
            model: Any = returned.model(trial, trial.build_model())
    except DeterminedDSError:
        raise
    except Exception as error:
        raise _unknown(f"{name}.build_model fails on the meta device: {error}") from error
    path, found = _outermost(model)
    if found is None:
        raise _unknown(f"{name} trains a {type(model).__name__}, which holds no model of transformers")
    adapted = found if _is_adapted(found) else None
    inner = adapted.get_base_model() if adapted is not None else found
    made = _of_config(inner.config, name, kind=_class_of_transformers(type(inner)))
    return replace(made, adapted=adapted, prefix=f"{path}." if path else "", trial=trial)


def model_of_folder(folder: Path) -> TrainedModel:
    """The Hugging Face model that a folder's config.json describes.

    Raises:
        ConfigError: it describes none.
    """
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # whatever is wrong with the file
        raise _unknown(f"{folder} has no config.json that transformers reads: {error}") from error
    return _of_config(config, str(folder))


def _of_config(config: Any, whose: str, kind: Any = None) -> TrainedModel:
    import transformers

    if kind is None:
        names = getattr(config, "architectures", None) or []
        kind = next((found for name in names if (found := getattr(transformers, name, None))), None)
    if kind is None:
        raise _unknown(f"the configuration of {whose} names no architectures of transformers")
    config = copy.deepcopy(config)
    config.architectures = [kind.__name__]
    try:
        with torch.device("meta"), only_errors("transformers"):
            model = kind(config)
    except Exception as error:
        raise _unknown(
            f"{kind.__name__} cannot be built from the configuration of {whose}: {error}"
        ) from error
    return TrainedModel(kind=kind, config=config, model=model)


def _outermost(model: Any) -> tuple[str, Any]:
    """The model of transformers, or of peft around one, that a module is or holds, and its name there."""
    import transformers

    found = (
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, transformers.PreTrainedModel) or _is_adapted(module)
    )
    return next(found, ("", None))


def _is_adapted(module: Any) -> bool:
    return hasattr(module, "peft_config") and hasattr(module, "get_base_model")


def _class_of_transformers(kind: type) -> type:
    """A class of transformers, which its users have: of a trial's own class its nearest parent there."""
    return next(each for each in kind.__mro__ if each.__module__.startswith("transformers."))


def _unknown(message: str) -> ConfigError:
    return ConfigError(Problem(key="--to", value="huggingface", message=message, fix=FIX, code="names"))
