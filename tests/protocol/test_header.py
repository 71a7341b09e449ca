"""What was decided, above the metrics: the same lines here and in the log of a task."""

from __future__ import annotations

import re
from typing import Any

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.reconcile import reconcile
from determined_ds.documents.document import Document
from determined_ds.protocol.header import decided

CPU = Accelerator(name="cpu", num_devices=2, bf16=False, fp16=False)


def test_what_stood_open_is_named_and_what_is_stated_is_not() -> None:
    ds = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": [0.9, 0.95]}},
        "bf16": "auto",
    }
    hparams = Document(
        name="a.yaml", data={"global_batch_size": 8, "learning_rate": 0.1 + 0.2, "weight_decay": 0}
    )
    lines = decided(
        "mine", "a:B", reconcile(hparams, Document(name="ds.json", data=ds), slots=2, accelerator=CPU)
    )
    assert lines[:3] == [
        "mine: a:B",
        "  slots      2 on cpu: 2 replicas, ZeRO 1",
        "  batch      8 = micro-batch 2 x 2 accumulated x 2 replicas",
    ]
    text = re.sub(r"\s+", " ", "\n".join(lines[3:]))
    assert "filled in optimizer.params.lr 0.3, " in text
    assert "optimizer.params.weight_decay 0, " in text
    assert "bf16.enabled false" in text
    assert "betas" not in text
    assert re.search(r"versions determined_ds \S+, determined \S+, deepspeed \S+, torch \S+, Python 3", text)
    assert max(map(len, lines)) <= 110


def test_a_period_by_the_clock_is_named() -> None:
    data = {"global_batch_size": 8, "fit": {"checkpoint_period": {"minutes": 1.5}}}
    hparams, ds = Document(name="a.yaml", data=data), Document(name="ds.json", data={})
    lines = decided("mine", "a:B", reconcile(hparams, ds, slots=2, accelerator=CPU))
    assert "  checkpoint after the first batch that ends 1.5 minutes after the last one" in lines


@pytest.mark.parametrize(
    ("hparams", "line"),
    [
        ({}, "1f1b: a bubble of 0.1111"),
        (
            {"pipe_schedule": "interleaved", "pipe_chunks": 2},
            "interleaved, 2 chunks a rank: a bubble of 0.0588",
        ),
    ],
)
def test_a_pipelines_schedule_is_named_with_the_bubble_to_expect(hparams: dict[str, Any], line: str) -> None:
    data = {"global_batch_size": 16, "pipe_parallel_size": 2, **hparams}
    ds = Document(name="ds.json", data={"gradient_accumulation_steps": 8})
    lines = decided(
        "mine", "a:B", reconcile(Document(name="a.yaml", data=data), ds, slots=2, accelerator=CPU)
    )
    assert lines[3] == f"  schedule   {line} by its order alone"
