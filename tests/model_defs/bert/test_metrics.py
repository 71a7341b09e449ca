"""Accuracy and F1 are those of the whole validation set, whoever holds which part of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score

from tests.harness.ranks import Ranks
from tests.model_defs.training import reported, train


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


HPARAMS = {
    "global_batch_size": 8,
    "sequence_length": 12,
    "dropout": 0.0,
    "learning_rate": 0.001,
    "weight_decay": 0.01,
    "warmup_num_steps": 2,
}


def predictions(trial: Any) -> list[tuple[int, int]]:
    """In each rank: (label, prediction) of every sample of validation."""
    from torch.utils.data import default_collate

    trial.engine.eval()
    dataset = trial.data.validation
    tokens_BT, mask_BT, labels_B = default_collate([dataset[index] for index in range(len(dataset))])
    with torch.no_grad():
        predicted_B = trial.logits(trial.engine, tokens_BT, mask_BT).argmax(-1)
    return list(zip(labels_B.tolist(), predicted_B.tolist(), strict=True))


@pytest.mark.parametrize("stage", [1, 3])
def test_validation_on_two_ranks_is_that_of_the_whole_set(
    stage: int, two_ranks: Ranks, tmp_path: Path
) -> None:
    data = {
        "path": write_rows(tmp_path / "train.jsonl", 200, 1),
        # Divides neither by the ranks nor by the micro-batch; the second rank ends on padding.
        "validation_path": write_rows(tmp_path / "validation.jsonl", 33, 2),
        "vocab_size": 280,
    }
    hparams = {**HPARAMS, "deepspeed_config": f"experiments/deepspeed/zero{stage}.json"}
    pairs, same = two_ranks.run(train, tmp_path / "run", "bert", hparams, data, 40, then=predictions)
    assert pairs == same
    assert len(pairs) == 33
    true, predicted = np.array(pairs).T
    f1, accuracy = reported(tmp_path / "run", "validation_f1", "validation_accuracy", group="validation")
    assert f1 == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    assert accuracy == pytest.approx(accuracy_score(true, predicted))
    assert len(set(predicted.tolist())) > 1, "a model that has learnt nothing proves nothing"
