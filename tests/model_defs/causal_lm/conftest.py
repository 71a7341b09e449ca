"""A text, and a saved model, for the tests of ``causal_lm``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.model_defs.causal_lm import tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The section ``data`` of a small text, by its bytes."""
    folder = tmp_path_factory.mktemp("data")
    return {"path": tiny.text_file(folder), "tokenizer": "bytes", "validation_fraction": 0.15}


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model to start from."""
    return tiny.saved_model(tmp_path_factory.mktemp("base"))
