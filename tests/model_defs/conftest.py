"""A text, for the tests of language models."""

from __future__ import annotations

from typing import Any

import pytest

from tests.model_defs.causal_lm import tiny


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The section ``data`` of a small text, by its bytes."""
    folder = tmp_path_factory.mktemp("data")
    return {"path": tiny.text_file(folder), "tokenizer": "bytes", "validation_fraction": 0.15}
