"""Train a causal language model with Hugging Face's Trainer: a script as its users write it.

det-ds run experiments/hf_trainer/const.yaml .
"""

from __future__ import annotations

from typing import Any

import determined as det
import torch
import transformers

from determined_ds.transformers import DetCallback, Trainer, TrainingArguments, init
from model_defs.common.text import TokenSequences, load_text


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences of tokens as transformers takes them; it shifts the labels itself.

    Args:
        sequences: Windows of the text.
    """

    def __init__(self, sequences: TokenSequences) -> None:
        self._sequences = sequences

    def __len__(self) -> int:
        return len(self._sequences)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens_T, _ = self._sequences[index]
        return {"input_ids": tokens_T, "labels": tokens_T}


def main() -> None:
    """Train what the trial's hyperparameters say."""
    with init() as core_context:
        args = TrainingArguments(output_dir="output", per_device_eval_batch_size=16)
        info = det.get_cluster_info()
        assert info is not None, "start it with: det-ds run experiments/hf_trainer/const.yaml ."
        hparams: dict[str, Any] = info.trial.hparams
        data = load_text(info.user_data, hparams["sequence_length"])
        config = transformers.AutoConfig.for_model(**hparams["model_config"])
        if config.vocab_size != data.vocab_size:
            raise SystemExit(
                f"hyperparameters.model_config.vocab_size must be {data.vocab_size}, as the data has it"
            )
        trainer = Trainer(
            model=transformers.AutoModelForCausalLM.from_config(config),
            args=args,
            train_dataset=Examples(data.train),
            eval_dataset=Examples(data.validation),
            callbacks=[DetCallback(core_context, args)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
