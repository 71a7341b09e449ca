"""DeepSpeed's own reading of a configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest


@pytest.fixture(scope="session")
def deepspeed_config() -> Iterator[Callable[[dict[str, Any], int], Any]]:
    """``deepspeed_config(mapping, replicas)``: what DeepSpeed makes of it; nothing is started."""
    patch = pytest.MonkeyPatch()
    patch.setenv("DS_ACCELERATOR", "cpu")
    from deepspeed.runtime import config as upstream

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)

    def read(ds_config: dict[str, Any], replicas: int) -> Any:
        mpu = SimpleNamespace(get_data_parallel_world_size=lambda: replicas)
        with mock.patch.object(upstream.dist, "get_rank", return_value=0):
            return upstream.DeepSpeedConfig(ds_config, mpu)

    yield read
    patch.undo()
