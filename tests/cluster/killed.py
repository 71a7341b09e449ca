"""Trials of which one rank kills itself, once: they join the context directory by ``det``'s ``--include``.

So a crash needs no access to the machine where the containers run. ``KILLED_RANK`` says which rank;
it dies in its eighth batch.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from typing import Any

from determined_ds import ReconciledTrial
from model_defs.gpt2.trial import GPT2PipelineTrial, GPT2Trial


class _Killed(ReconciledTrial):
    _num_begun = 0

    def train_batch(self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int) -> Any:
        self._num_begun += 1
        is_first_run = os.environ["DET_TRIAL_RUN_ID"] == "1"
        if is_first_run and self._num_begun == 8 and os.environ["RANK"] == os.environ["KILLED_RANK"]:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train_batch(dataloader_iter, epoch_idx, batch_idx)


class Killed(_Killed, GPT2Trial):
    """Trains as the one it is made of, but that a rank of its first run dies in the middle."""


class KilledPipeline(_Killed, GPT2PipelineTrial):
    """The same of a pipeline."""
