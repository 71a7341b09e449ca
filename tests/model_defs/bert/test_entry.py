"""BERT through the real entry: what is saved loads in plain Hugging Face, with its labels and its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from tests.harness.command import ROOT, det_ds
from tests.model_defs.training import reported
from tests.package import checkpoints


def test_a_model_that_is_saved_loads_in_plain_hugging_face(tmp_path: Path) -> None:
    kinds = (("dull", "no"), ("a fine one", "yes"))
    lines = [f"{kinds[number % 2][0]} {number},{kinds[number % 2][1]}" for number in range(200)]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *lines]))
    settings = {
        "data.path": tmp_path / "reviews.csv",
        "data.vocab_size": 300,
        "hyperparameters.deepspeed_config": "experiments/deepspeed/zero3.json",
        "hyperparameters.fit.max_length.batches": 3,
        "hyperparameters.warmup_num_steps": 1,
    }
    words = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    run_dir = tmp_path / "run"
    done = det_ds("run", "experiments/bert/const.yaml", ".", *words, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    tokens, samples = (reported(run_dir, f"{name}_per_second")[-1] for name in ("tokens", "samples"))
    assert tokens == pytest.approx(128 * samples)

    (checkpoint,) = checkpoints(run_dir)
    model: Any = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    model.save_pretrained(tmp_path / "saved")
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint / "tokenizer")
    batch = tokenizer(["a fine one", "dull, and too long"], padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    assert plain.config.id2label == {0: "no", 1: "yes"}
    assert plain.config.vocab_size == len(tokenizer) == 300
