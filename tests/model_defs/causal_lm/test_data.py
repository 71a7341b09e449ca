"""The text of a causal language model: its own tokens, and documents kept apart where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from model_defs.causal_lm.model import check_masks, positions_in_documents
from model_defs.common.text import load_text
from tests.model_defs.causal_lm import tiny
from tests.model_defs.words import save_tokenizer
from tests.package import refusal


@pytest.fixture
def documents(tmp_path: Path) -> str:
    lines = [json.dumps({"text": "one two three four"[: 3 + 5 * (i % 3)].strip()}) for i in range(60)]
    path = tmp_path / "documents.jsonl"
    path.write_text("\n".join(lines))
    return str(path)


def test_a_models_own_tokenizer_is_taken_and_needs_no_pad_token(documents: str, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "model", eos_token="<eos>")
    text = load_text({"path": documents}, 4, default_tokenizer=folder)
    assert text.tokenizer == folder
    assert (text.vocab_size, text.separator) == (6, 1)
    tokens_T, targets_T = text.train[0]
    assert torch.equal(tokens_T[1:], targets_T[:-1])
    assert 1 in torch.cat([text.train[i][0] for i in range(4)])


@pytest.mark.parametrize(("tokenizer", "default"), [(None, None), ("bytes", None), ("bytes", "nowhere")])
def test_bytes_are_taken_at_random_weights_or_where_asked_for(
    tokenizer: str | None, default: str | None, documents: str
) -> None:
    text = load_text({"path": documents, "tokenizer": tokenizer}, 4, default_tokenizer=default)
    assert (text.vocab_size, text.separator) == (256, 0)


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "mistral", "qwen3", "phi3", "gemma2"])
def test_isolated_documents_see_nothing_of_each_other(model_type: str) -> None:
    torch.manual_seed(0)
    kind = transformers.models.auto.configuration_auto.CONFIG_MAPPING[model_type]
    sizes = {**tiny.SIZES, "vocab_size": 64, "head_dim": 8, "pad_token_id": None, "eos_token_id": None}
    model = transformers.AutoModelForCausalLM.from_config(kind(**sizes, bos_token_id=None)).eval()
    check_masks(model, isolated=True)
    tokens_BT = torch.randint(1, 64, (2, 12))
    tokens_BT[:, 5] = 0  # two documents in each row
    positions_BT = positions_in_documents(tokens_BT, 0)
    with torch.no_grad():
        packed = model(tokens_BT, position_ids=positions_BT, use_cache=False).logits
        alone = model(tokens_BT[:, 6:], use_cache=False).logits
        across = model(tokens_BT, use_cache=False).logits
    assert torch.allclose(packed[:, 6:], alone, atol=1e-5)
    assert torch.allclose(packed[:, :6], across[:, :6], atol=1e-5)
    assert not torch.allclose(across[:, 6:], alone, atol=1e-3)


def test_a_model_whose_masks_know_no_documents_is_refused() -> None:
    config = transformers.BloomConfig(hidden_size=32, n_layer=1, n_head=2, vocab_size=64)
    model = transformers.BloomForCausalLM(config)
    found = refusal(lambda: check_masks(model, isolated=True))
    assert "attend_across_documents" in f"{found.key} {found.fix}"
