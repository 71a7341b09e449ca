"""Trials on their own: what they report of a validation set, how they resume and are cut, what they save."""

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
from tests.checkpoints.command import succeeded
from tests.harness.command import ROOT, det_ds
from tests.harness.ranks import Ranks
from tests.model_defs.training import reported, train
from tests.package import checkpoints

# --- BERT ---


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


def test_berts_validation_on_two_ranks_is_that_of_the_whole_set(two_ranks: Ranks, tmp_path: Path) -> None:
    data = {
        "path": write_rows(tmp_path / "train.jsonl", 200, 1),
        # Divides neither by the ranks nor by the micro-batch; the second rank ends on padding.
        "validation_path": write_rows(tmp_path / "validation.jsonl", 33, 2),
        "vocab_size": 280,
    }
    hparams = {"global_batch_size": 8, "sequence_length": 12, "dropout": 0.0, "learning_rate": 0.001}
    hparams |= {
        "warmup_num_steps": 2,
        "deepspeed_config": "experiments/deepspeed/zero1.json",
        "zero_stage": 3,
    }
    pairs, same = two_ranks.run(train, tmp_path / "run", "bert", hparams, data, 40, then=predictions)
    assert pairs == same
    assert len(pairs) == 33
    true, predicted = np.array(pairs).T
    f1, accuracy = reported(tmp_path / "run", "validation_f1", "validation_accuracy", group="validation")
    assert f1 == pytest.approx(f1_score(true, predicted, average="macro", zero_division=0))
    assert accuracy == pytest.approx(accuracy_score(true, predicted))
    assert len(set(predicted.tolist())) > 1, "a model that has learnt nothing proves nothing"


def test_a_bert_that_is_saved_loads_in_plain_hugging_face(tmp_path: Path) -> None:
    """With the names of its labels, and its tokenizer."""
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
    [checkpoint] = checkpoints(run_dir)
    model: Any = load_model_from_checkpoint_path(checkpoint, context_dir=ROOT)
    succeeded(
        "export", checkpoint, "--to", "huggingface", "--context-dir", ROOT, "--output", tmp_path / "saved"
    )
    plain = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "saved").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    batch = tokenizer(["a fine one", "dull, and too long"], padding=True, return_tensors="pt")
    inputs = {name: batch[name] for name in ("input_ids", "attention_mask")}
    with torch.no_grad():
        assert torch.equal(plain(**inputs).logits, model(**inputs).logits)
    assert plain.config.id2label == {0: "no", 1: "yes"}
    assert plain.config.vocab_size == len(tokenizer) == 300


# --- DCGAN ---

DCGAN = {
    "global_batch_size": 64,
    "deepspeed_config": "experiments/deepspeed/zero1.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
    "generator_zero_stage": 2,
    "discriminator_learning_rate": 0.002,
    "learning_rate": 0.001,
    "warmup_num_steps": 2,
    "image_size": 8,
    "latent_size": 8,
    "generator_features": 8,
    "discriminator_features": 8,
}


def steps_of_engines(trial: Any) -> dict[str, int]:
    return {name: engine.global_steps for name, engine in trial.engines.items()}


def test_a_resumed_dcgan_is_the_whole_one(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each engine under another stage, latents that are drawn, and a process that reads ahead."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    two_ranks.run(train, whole, "dcgan", DCGAN, {"num_workers": 1}, 4, period=2)
    two_ranks.run(train, parts, "dcgan", DCGAN, {"num_workers": 1}, 2)
    (latest,) = checkpoints(parts)
    assert {"model0", "model1"} <= {path.name for path in latest.iterdir()}
    more = {"period": 2, "latest_checkpoint": latest.name, "then": steps_of_engines}
    steps = two_ranks.run(train, parts, "dcgan", DCGAN, {"num_workers": 1}, 4, **more)
    assert steps == [{"generator": 4, "discriminator": 4}] * 2
    for group, names in (
        ("training", ("d_loss", "g_loss", "loss")),
        ("validation", ("validation_d_loss", "validation_g_loss", "validation_frechet_distance")),
    ):
        assert reported(parts, *names, group=group) == reported(whole, *names, group=group)
    assert len(reported(parts, "d_loss")) == 4


# --- GPT-2 as a pipeline ---


def layers_of(trial: Any) -> list[str]:
    """In each rank: the layers that it has of a pipeline."""
    return [type(layer).__name__ for layer in trial.engine.module.forward_funcs]


def test_a_pipeline_trains_the_same_however_it_is_cut(
    two_ranks: Ranks, tmp_path: Path, data: dict[str, Any]
) -> None:
    common = {
        "global_batch_size": 4,
        "sequence_length": 16,
        "learning_rate": 0.01,
        "warmup_num_steps": 2,
        "pipe_parallel_size": 2,
        "deepspeed_config": "experiments/deepspeed/pipeline.json",
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
    }
    cuts: dict[str, dict[str, Any]] = {
        "blocks": {},
        "uniform": {"partition_method": "uniform", "activation_checkpointing": True},
        "parameters": {"partition_method": "parameters", "activation_checkpoint_interval": 2},
    }
    layers = {}
    for name, more in cuts.items():
        layers[name] = two_ranks.run(
            train, tmp_path / name, "gpt2 in a pipeline", {**common, **more}, data, 2, then=layers_of
        )
    assert [stage.count("Block") for stage in layers["blocks"]] == [2, 2]
    assert [len(stage) for stage in layers["uniform"]] == [4, 4]
    assert len(reported(tmp_path / "blocks")) == 2
    for name in cuts:
        assert reported(tmp_path / name) == pytest.approx(reported(tmp_path / "blocks"), rel=1e-4), name
