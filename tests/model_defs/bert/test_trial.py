"""Accuracy and F1 are those of the whole validation set; what is saved loads in plain Hugging Face, with its labels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sklearn.metrics import accuracy_score, f1_score

from determined_ds import load_model_from_checkpoint_path
from tests.harness.command import ROOT, det_ds
from tests.harness.ranks import Ranks
from tests.model_defs.training import reported, train
from tests.package import checkpoints


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
    hparams = {**HPARAMS, "deepspeed_config": "experiments/deepspeed/zero1.json", "zero_stage": stage}
    pairs, same = two_ranks.run(train, tmp_path / "run", "bert", hparams, data, 40, then=predictions)
    assert pairs == same
    assert len(pairs) == 33
    true, predicted = np.array(pairs).T
    f1, accuracy = reported(tmp_path / "run", "validation_f1", "validation_accuracy", group="validation")
    assert f1 == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    assert accuracy == pytest.approx(accuracy_score(true, predicted))
    assert len(set(predicted.tolist())) > 1, "a model that has learnt nothing proves nothing"


def test_a_model_that_is_saved_loads_in_plain_hugging_face(tmp_path: Path) -> None:
    kinds = (("dull", "no"), ("a fine one", "yes"))
    lines = [f"{kinds[number % 2][0]} {number},{kinds[number % 2][1]}" for number in range(200)]
    (tmp_path / "reviews.csv").write_text("\n".join(["text,label", *lines]))
    settings = {
        "data.path": tmp_path / "reviews.csv",
        "data.vocab_size": 300,
        "hyperparameters.zero_stage": 3,
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
