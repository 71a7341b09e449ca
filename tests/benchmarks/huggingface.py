"""The same GPT-2 under the Hugging Face Trainer with DeepSpeed, at that Trainer's defaults: one rank of it.

Started by torch's launcher; rank 0 writes what it measured to the file that is named.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from model_defs.common.text import load_text, next_token_loss
from model_defs.gpt2.model import GPT2, gpt2_config, load_initial_weights

GLOBAL_BATCH, SEQUENCE_LENGTH, RANKS = 32, 128, 2
DEFAULT_BATCH = TrainingArguments.per_device_train_batch_size  # of a device: 8
WARMUP = 5


class WithLoss(torch.nn.Module):
    """Our model, told as the Trainer wants it: a mapping with the loss."""

    def __init__(self, model: GPT2) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": next_token_loss(self.model(tokens), targets)}


class StepTimes(TrainerCallback):
    """Seconds from one step to the next."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._last = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._last = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.seconds.append(time.perf_counter() - self._last)


class AsMappings(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Pairs of tokens and targets, by name."""

    def __init__(self, pairs: Any) -> None:
        self._pairs = pairs

    def __len__(self) -> int:
        return len(self._pairs)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, targets = self._pairs[index]
        return {"tokens": tokens, "targets": targets}


def main(steps: int, out: Path) -> None:
    """Train, and write samples a second and the validation loss."""
    data = load_text({"path": None, "tokenizer": None}, SEQUENCE_LENGTH)
    config = gpt2_config("tiny", vocab_size=256, sequence_length=SEQUENCE_LENGTH, dropout=0.0)
    model = GPT2(config)
    load_initial_weights(model, config, 0)
    arguments = TrainingArguments(
        output_dir=str(out.parent / "huggingface"),
        max_steps=steps,
        gradient_accumulation_steps=GLOBAL_BATCH // (DEFAULT_BATCH * RANKS),
        learning_rate=0.003,
        weight_decay=0.01,
        warmup_steps=10,
        lr_scheduler_type="constant_with_warmup",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        deepspeed={
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "zero_optimization": {"stage": 0},
            "optimizer": {
                "type": "AdamW",
                "params": {
                    "lr": "auto",
                    "betas": "auto",
                    "eps": "auto",
                    "weight_decay": "auto",
                    "torch_adam": True,
                },
            },
        },
    )
    times = StepTimes()
    trainer = Trainer(
        model=WithLoss(model),
        args=arguments,
        train_dataset=AsMappings(data.train),
        eval_dataset=AsMappings(data.validation),
        callbacks=[times],
    )
    trainer.train()
    engine = trainer.model_wrapped
    engine.eval()
    losses = []
    with torch.no_grad():
        for start in range(0, len(data.validation), 32):
            pairs = [data.validation[i] for i in range(start, min(start + 32, len(data.validation)))]
            tokens, targets = (torch.stack(part) for part in zip(*pairs, strict=True))
            losses += [float(engine(tokens, targets)["loss"])] * len(pairs)
    if arguments.process_index == 0:
        step = statistics.median(times.seconds[WARMUP:])
        measured = {"samples_per_second": GLOBAL_BATCH / step, "validation_loss": statistics.mean(losses)}
        out.write_text(json.dumps(measured))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
