"""BERT on two ranks reports the metrics of the whole validation set, and is exported to plain Hugging Face."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score

from tests.checkpoints.command import succeeded
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.tiny import checkpoint, reported, train


def write_rows(path: Path, num_rows: int, seed: int) -> str:
    """Texts of three classes, unevenly many."""
    generator = np.random.default_rng(seed)
    lines = []
    for _ in range(num_rows):
        label = int(generator.choice(3, p=[0.5, 0.3, 0.2]))
        words = generator.choice(["red", "green", "blue"], 6, p=np.roll([0.8, 0.1, 0.1], label))
        lines.append(json.dumps({"text": " ".join(words), "label": label}))
    path.write_text("\n".join(lines))
    return str(path)


def predictions(trial: Any) -> list[tuple[int, int]]:
    """In each rank: (label, prediction) of every sample of validation."""
    trial.engine.eval()
    tokens_BT, mask_BT, labels_B = trial.data.validation.tensors
    with torch.no_grad():
        predicted_B = trial.logits(trial.engine, tokens_BT, mask_BT).argmax(-1)
    return list(zip(labels_B.tolist(), predicted_B.tolist(), strict=True))


def test_bert_on_two_ranks_and_exported_to_plain_hugging_face(two_ranks: Ranks, tmp_path: Path) -> None:
    """The export has the names of its labels, and its tokenizer."""
    data = {
        "path": write_rows(tmp_path / "train.jsonl", 200, 1),
        # Divides neither by the ranks nor by the micro-batch; the second rank ends on padding.
        "validation_path": write_rows(tmp_path / "validation.jsonl", 33, 2),
        "vocab_size": 280,
    }
    hparams = {"global_batch_size": 8, "sequence_length": 12, "dropout": 0.0, "learning_rate": 0.001}
    hparams |= {
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": 3,
        "warmup_num_steps": 2,
    }
    run_dir, saved = tmp_path / "run", tmp_path / "saved"
    pairs, same = two_ranks.run(train, run_dir, hparams, data, 40, model="bert", then=predictions)
    assert pairs == same
    assert len(pairs) == 33
    true, predicted = np.array(pairs).T
    f1, accuracy = reported(run_dir, "validation_f1", "validation_accuracy", group="validation")
    assert f1 == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    assert accuracy == pytest.approx(accuracy_score(true, predicted))
    assert len(set(predicted.tolist())) > 1, "a model that has learnt nothing proves nothing"

    words = ("--to", "huggingface", "--context-dir", ROOT, "--output", saved)
    succeeded("export", checkpoint(run_dir), *words)
    classify = transformers.pipeline("text-classification", str(saved))
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    assert [int(found["label"]) for found in classify([row["text"] for row in rows])] == predicted.tolist()
