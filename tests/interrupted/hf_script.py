"""A script of transformers that ends its own run, at points that a test names as for ``trials.py``.

It is run as ``python3 -m tests.interrupted.hf_script``.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import torch
import transformers

from determined_ds.transformers import DetCallback, TrainingArguments, init

LENGTH, VOCABULARY = 16, 64


def tokens(count: int) -> list[dict[str, torch.Tensor]]:
    """Random sequences, the same ones in every process."""
    drawn = torch.randint(0, VOCABULARY, (count, LENGTH), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": each, "labels": each} for each in drawn]


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


def main() -> None:
    with init() as core_context:
        args = TrainingArguments(per_device_eval_batch_size=4, disable_tqdm=True)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64}
        heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
        config = transformers.LlamaConfig(**sizes, **heads, attention_dropout=0.1)
        trainer = transformers.Trainer(
            model=transformers.AutoModelForCausalLM.from_config(config),
            args=args,
            train_dataset=tokens(40),
            eval_dataset=tokens(12),
            callbacks=[Killer(), DetCallback(core_context, args)],
        )
        trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)


if __name__ == "__main__":
    main()
