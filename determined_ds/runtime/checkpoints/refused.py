"""Checkpoints that cannot be loaded, in a message."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Iterator

import torch

from determined_ds.errors import CheckpointError, ConfigError, Problem


def another_model(uuid: str, reason: str) -> ConfigError:
    """The error of a checkpoint that was written by another model or another optimizer."""
    return ConfigError(
        Problem(
            key="checkpoint",
            value=uuid,
            message=f"does not fit this model and this optimizer: {reason}",
            fix="use the model, its sizes and the optimizer that wrote it, or start anew without it",
            code="another-model",
        )
    )


@contextlib.contextmanager
def explained(uuid: str, *, own_method: bool) -> Iterator[None]:
    """Say in a message what DeepSpeed and torch say of a checkpoint that they cannot load.

    Args:
        uuid: Of the checkpoint.
        own_method: The trial loads it by a method of its own, whose mistakes keep their tracebacks.
    """
    try:
        yield
    except AssertionError as error:
        raise CheckpointError(
            f"DeepSpeed refuses checkpoint {uuid}: {error} Resume with the ZeRO stage, the slots and "
            "the model that wrote it."
        ) from error
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"checkpoint {uuid} holds objects that could run code, and is not loaded: {error}"
        ) from error
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        if own_method:
            raise
        raise another_model(uuid, f"{type(error).__name__}: {error}") from error
