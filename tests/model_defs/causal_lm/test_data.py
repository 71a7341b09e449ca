"""Packed text: the same with workers and after a resume; documents kept apart where that is asked for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from determined_ds import DataLoader
from determined_ds.config.batch import Batch
from determined_ds.errors import ConfigError
from determined_ds.runtime.data.samples import training_data
from model_defs.causal_lm.model import check_masks, positions_in_documents
from model_defs.common.text import load_text
from tests.model_defs.causal_lm import tiny

WORDS = ["<unk>", "<eos>", "one", "two", "three", "four"]


def save_tokenizer(folder: Path, **special_tokens: str) -> str:
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", **special_tokens
    ).save_pretrained(folder)
    return str(folder)


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


def test_a_model_that_begins_at_random_takes_bytes(documents: str) -> None:
    for tokenizer in (None, "bytes"):
        text = load_text({"path": documents, "tokenizer": tokenizer}, 4)
        assert (text.vocab_size, text.separator) == (256, 0)


def test_bytes_are_taken_for_a_model_where_they_are_asked_for(documents: str) -> None:
    text = load_text({"path": documents, "tokenizer": "bytes"}, 4, default_tokenizer="nowhere")
    assert text.vocab_size == 256


def stream(dataset: Any, *, workers: int, start_batch: int, num: int) -> list[torch.Tensor]:
    loader = DataLoader(dataset, batch_size=2, shuffle=True, drop_last=True, num_workers=workers)
    batch = Batch(global_batch_size=8, micro_batch_size=2, accumulation=2, replicas=2)
    batches = training_data(loader, batch=batch, replica=1, seed=7, start_batch=start_batch).batches
    return [next(batches)[0] for _ in range(num)]


def test_loaders_are_reproducible_with_workers_and_resume_exactly(tmp_path: Path) -> None:
    text = load_text({"path": tiny.text_file(tmp_path)}, 32)
    plain = stream(text.train, workers=0, start_batch=0, num=20)
    for workers, start_batch in ((2, 0), (0, 3), (2, 3)):
        again = stream(text.train, workers=workers, start_batch=start_batch, num=20 - 2 * start_batch)
        assert all(torch.equal(a, b) for a, b in zip(plain[2 * start_batch :], again, strict=True))


# ------------------------------------------------------------------------------------------ documents


def test_positions_start_again_after_each_separator() -> None:
    tokens_BT = torch.tensor([[5, 5, 0, 5, 5, 5, 0, 0], [0, 5, 5, 5, 5, 5, 5, 5]])
    assert positions_in_documents(tokens_BT, 0).tolist() == [
        [0, 1, 2, 0, 1, 2, 3, 0],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]


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
    with pytest.raises(ConfigError, match="attend_across_documents"):
        check_masks(model, isolated=True)
