"""Hugging Face's Trainer under DeepSpeed on Determined: its arguments reconciled, its checkpoints and metrics kept.

One changed import::

    from determined_ds.transformers import DetCallback, TrainingArguments

``DetCallback`` takes the arguments of that in ``determined.transformers``. ``TrainingArguments`` and ``Trainer`` are
those of ``transformers``: the first is filled from the trial's hyperparameters and its DeepSpeed JSON, the second
resumes by itself and takes part in ``det-ds run --test``.
"""

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
