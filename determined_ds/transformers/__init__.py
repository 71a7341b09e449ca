"""Hugging Face's Trainer under DeepSpeed on Determined: its arguments reconciled, its checkpoints and metrics kept."""

from determined_ds.transformers.arguments import (
    ReconciledArguments,
    Seq2SeqTrainingArguments,
    TrainingArguments,
)
from determined_ds.transformers.callback import DetCallback, ResumingTrainer, Seq2SeqTrainer, Trainer, init

__all__ = [
    "DetCallback",
    "ReconciledArguments",
    "ResumingTrainer",
    "Seq2SeqTrainer",
    "Seq2SeqTrainingArguments",
    "Trainer",
    "TrainingArguments",
    "init",
]
