"""Train a causal language model with Hugging Face's Trainer: a script as its users write it.

det-ds run experiments/hf_trainer/const.yaml .
"""

from __future__ import annotations

from typing import Any

import determined as det
import torch
import transformers

from determined_ds.transformers import DetCallback, Trainer, TrainingArguments, init
from model_defs.common.text import load_text


def collate(sequences: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A batch as transformers takes it; it shifts the labels itself."""
    tokens_BT = torch.stack([tokens_T for tokens_T, _ in sequences])
    return {"input_ids": tokens_BT, "labels": tokens_BT}


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
            data_collator=collate,
            train_dataset=data.train,
            eval_dataset=data.validation,
            callbacks=[DetCallback(core_context, args)],
        )
        trainer.train()


if __name__ == "__main__":
    main()
