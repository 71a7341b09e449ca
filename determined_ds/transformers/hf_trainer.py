"""``Trainer`` of transformers that resumes by itself, and proves its checkpoints under ``det-ds run --test``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import transformers
from transformers.integrations.deepspeed import deepspeed_load_checkpoint

from determined_ds.errors import ConfigError, Problem
from determined_ds.train.loop.proof import prove_checkpoint
from determined_ds.train.scripts.given_run import script_run
from determined_ds.transformers.det_callback import DetCallback
from determined_ds.transformers.here import is_chief

WITH_CALLBACK = "write Trainer(..., callbacks=[DetCallback(core_context, args)])"


class ResumingTrainer:
    """What makes a class of trainers resume by itself and take part in ``--test``; put it before that class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        run = script_run()
        self._is_test = run is not None and run.test
        self._is_measured = run is not None and run.measurement is not None
        data: Any = getattr(self, "eval_dataset", None)
        if self._is_test and hasattr(data, "__getitem__") and hasattr(data, "__len__"):
            options: Any = self.args  # type: ignore[attr-defined]
            one_batch = range(min(len(data), options.per_device_eval_batch_size * options.world_size))
            self.eval_dataset = (
                data.select(one_batch)
                if hasattr(data, "select")
                else torch.utils.data.Subset(data, one_batch)
            )

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, from ``args.resume_from_checkpoint`` where nothing else is said."""
        if resume_from_checkpoint is None:
            resume_from_checkpoint = self.args.resume_from_checkpoint  # type: ignore[attr-defined]
        if self._is_measured and self._det_callback is None:
            message = "needs a DetCallback, which sees the steps"
            raise ConfigError(Problem(key="--measure", message=message, fix=WITH_CALLBACK, code="measure"))
        output = super().train(resume_from_checkpoint, *args, **kwargs)  # type: ignore[misc]
        if self._is_test:
            self._prove()
        return output

    @property
    def _det_callback(self) -> DetCallback | None:
        callbacks = self.callback_handler.callbacks  # type: ignore[attr-defined]
        return next((each for each in callbacks if isinstance(each, DetCallback)), None)

    def _prove(self) -> None:
        """Load the stored checkpoint over scrambled weights, and evaluate to the same number."""
        trainer: Any = self
        callback = self._det_callback
        if callback is None or not trainer.is_deepspeed_enabled:
            message = "needs a DetCallback and a DeepSpeed JSON, to store a checkpoint and load it back"
            raise ConfigError(Problem(key="--test", message=message, fix=WITH_CALLBACK, code="test"))
        engine, loss = trainer.model_wrapped, "eval_loss"

        def load() -> None:
            with callback.stored() as folder:
                deepspeed_load_checkpoint(engine, str(folder))

        context = SimpleNamespace(models=[engine], device=trainer.args.device)
        same = prove_checkpoint(context, lambda: trainer.evaluate().get(loss), load)
        run = script_run()
        assert run is not None
        run.trained = True
        if is_chief():
            print(f"test passed: trained, validated, saved, loaded back, validated to {same}", flush=True)


class Trainer(ResumingTrainer, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer``, resuming from ``args.resume_from_checkpoint``; ``det-ds run --test`` needs it."""


class Seq2SeqTrainer(ResumingTrainer, transformers.Seq2SeqTrainer):  # type: ignore[misc]
    """``transformers.Seq2SeqTrainer``, in the same way."""
