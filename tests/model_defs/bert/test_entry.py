"""BERT through the real entry: what is saved loads in plain Hugging Face, tokenizer and all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from tests.command import ROOT, det_ds

CONST = "experiments/bert/const.yaml"


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    lines = [
        f"{'a fine one' if number % 2 else 'dull'} {number},{'yes' if number % 2 else 'no'}"
        for number in range(200)
    ]
    file = tmp_path / "reviews.csv"
    file.write_text("\n".join(["text,label", *lines]))
    return file


def test_a_model_that_is_saved_loads_in_plain_hugging_face(
    reviews: Path, tmp_path: Path, metrics_of: Any
) -> None:
    run_dir = tmp_path / "run"
    settings = {
        "data.path": reviews,
        "data.vocab_size": 300,
        "hyperparameters.fit.max_length.batches": 3,
        "hyperparameters.warmup_num_steps": 1,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    done = det_ds("run", CONST, ".", *words, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    assert {"validation_loss", "validation_accuracy", "validation_f1"} <= metrics_of(run_dir, "validation")[
        -1
    ].keys()
    last = metrics_of(run_dir, "training")[-1]
    assert last["tokens_per_second"] == pytest.approx(128 * last["samples_per_second"])
    (checkpoint,) = (run_dir / "checkpoints").iterdir()
    model = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    model.save_pretrained(tmp_path / "saved")  # type: ignore[operator]
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    batch = tokenizer(["a fine one", "dull, and too long"], padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    assert plain.config.id2label == {0: "no", 1: "yes"}
    assert plain.config.vocab_size == len(tokenizer) == 300
