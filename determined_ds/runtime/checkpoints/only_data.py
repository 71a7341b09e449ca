"""Reading torch's files without executing anything: tensors, plain values, and the few classes of :data:`ALLOWED`."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import torch


def _allowed() -> list[Any]:
    """What may be named in a checkpoint besides tensors and plain values: classes that only hold values."""
    import numpy as np
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address
    from numpy._core.multiarray import _reconstruct, scalar

    numpy_dtypes = [getattr(np.dtypes, name) for name in np.dtypes.__all__]
    return [
        DynamicLossScaler,
        LossScaler,
        ZeroStageEnum,
        fragment_address,
        _reconstruct,
        scalar,
        np.ndarray,
        np.dtype,
        *numpy_dtypes,
        torch.Size,
        torch.device,
    ]


ALLOWED: list[Any] = []


@contextlib.contextmanager
def only_data() -> Iterator[None]:
    """Whatever is loaded in here by ``torch.load``, DeepSpeed's own calls included, may execute nothing."""
    if not ALLOWED:
        ALLOWED.extend(_allowed())
    before = os.environ.get("TORCH_FORCE_WEIGHTS_ONLY_LOAD")
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    try:
        with torch.serialization.safe_globals(ALLOWED):
            yield
    finally:
        if before is None:
            del os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"]
        else:
            os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = before


def to_their_kind_of_device(device: torch.device) -> Callable[[Any, str], Any]:
    """``torch.load``'s ``map_location``: what was on a GPU goes to this rank's, all else to the host.

    A reducer adds up on the device where its batches are: on the host, its next addition would fail.

    Args:
        device: Of this rank.
    """

    def place(storage: Any, location: str) -> Any:
        return storage.to(device=device) if location.startswith(device.type) else storage

    return place
