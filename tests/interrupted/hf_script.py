"""A script of transformers that ends its own run, at points that a test names as for ``trials.py``.

It is run as ``python3 -m tests.interrupted.hf_script``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import determined as det
import torch
import transformers

from determined_ds.transformers import DetCallback, TrainingArguments, init

NUM_SAMPLES, LENGTH, VOCABULARY = 40, 16, 64


class Tokens(torch.utils.data.Dataset):
    """Random sequences, the same ones in every process."""

    def __init__(self, count: int) -> None:
        self.tokens = torch.randint(
            0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Killer(transformers.TrainerCallback):
    """Ends the run at the points of ``STOP_AT``, by SIGTERM to its launcher, and of ``KILL_AT``, by SIGKILL here."""

    def _come_to(self, place: str, step: int) -> None:
        if os.environ["RANK"] != "0":
            return
        point = f"{place}:{step}"
        if point in os.environ.get("STOP_AT", "").split(","):
            os.kill(os.getppid(), signal.SIGTERM)  # the launcher
            time.sleep(1)  # until this rank has the signal, too
        if point in os.environ.get("KILL_AT", "").split(","):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._come_to("after", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._come_to("torn", state.global_step)


def model_of(hparams: dict[str, Any]) -> transformers.PreTrainedModel:
    """A tiny model with dropout."""
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        attention_dropout=0.1,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def main() -> None:
    with init() as core_context:
        args = TrainingArguments(per_device_eval_batch_size=4, disable_tqdm=True)
        info = det.get_cluster_info()
        assert info is not None
        trainer = transformers.Trainer(
            model=model_of(info.trial.hparams),
            args=args,
            train_dataset=Tokens(NUM_SAMPLES),
            eval_dataset=Tokens(12),
            callbacks=[Killer(), DetCallback(core_context, args)],
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
