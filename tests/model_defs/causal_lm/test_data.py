"""The text of a causal language model: its own tokens, and documents kept apart where that is asked for."""

from __future__ import annotations

import pytest
import torch
import transformers

from model_defs.causal_lm.model import check_masks, positions_in_documents
from tests.model_defs.causal_lm import tiny
from tests.package import refusal


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
