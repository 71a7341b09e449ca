"""BERT under DeepSpeed, data parallel with ZeRO: which class a text is of.

Legend of shape suffixes: B batch, T tokens, K classes; of KK the first is true, the second predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from determined import pytorch
from torch.nn import functional

from determined_ds import DataLoader, DataParallelTrial
from model_defs.bert.data import load_texts
from model_defs.bert.model import Options, bert_config, build_bert
from model_defs.common.classifier import parse_options
from model_defs.common.parameters import decay_groups

TOKENIZER = "tokenizer"


class BertTrial(DataParallelTrial):
    """``BertForSequenceClassification``, replicated."""

    validation_metrics = ("validation_loss", "validation_accuracy", "validation_f1")

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.f1 = MacroF1(self.config.num_labels)
        context.wrap_reducer(self.f1, name="validation_f1", for_training=False)

    def prepare(self) -> None:
        only_sizes = self.context.device.type == "meta"
        self.options = parse_options(Options, self.context.get_hparams())
        self.data = load_texts(
            self.context.get_data_config(),
            self.options.sequence_length,
            pretrained=None if only_sizes else self.options.pretrained,
        )
        self.config = bert_config(
            self.options,
            self.data.classes,
            vocab_size=len(self.data.tokenizer),
            pad_token_id=self.data.tokenizer.pad_token_id,
            only_sizes=only_sizes,
        )

    def build_model(self) -> torch.nn.Module:
        return build_bert(self.options, self.config, self.context.get_trial_seed())

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        tokens_BT, mask_BT, labels_B = batch
        return functional.cross_entropy(self.logits(model, tokens_BT, mask_BT), labels_B)

    def evaluate(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        tokens_BT, mask_BT, labels_B = batch
        logits_BK = self.logits(model, tokens_BT, mask_BT)
        predicted_B = logits_BK.argmax(-1)
        self.f1.update(labels_B, predicted_B)
        return {
            "validation_loss": functional.cross_entropy(logits_BK, labels_B),
            "validation_accuracy": (predicted_B == labels_B).float().mean(),
        }

    @staticmethod
    def logits(model: Any, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """logits_BK in float32, whatever the model computes in."""
        # As attention takes it: of a flat mask, transformers asks the device in every step whether it hides anything.
        mask_B11T = mask_BT[:, None, None, :].bool()
        logits_BK: torch.Tensor = model(input_ids=tokens_BT, attention_mask=mask_B11T).logits.float()
        return logits_BK

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation)

    def export_files(self, folder: Path) -> None:
        self.data.tokenizer.save_pretrained(folder)

    def build_callbacks(self) -> dict[str, pytorch.PyTorchCallback]:
        return {TOKENIZER: _SavesTokenizer(self)}

    def tokens_per_sample(self) -> int:
        return self.options.sequence_length


class _SavesTokenizer(pytorch.PyTorchCallback):
    """Puts the tokenizer into every checkpoint: without it the model cannot read."""

    def __init__(self, trial: BertTrial) -> None:
        self._trial = trial

    def on_checkpoint_write_end(self, checkpoint_dir: str) -> None:
        if self._trial.context.distributed.rank == 0:
            self._trial.data.tokenizer.save_pretrained(Path(checkpoint_dir) / TOKENIZER)


class MacroF1(pytorch.MetricReducer):
    """Macro F1 over any number of ranks: (true, predicted) pairs are counted, the counts summed, then divided.

    The mean over classes of 2 x true positives / (predicted + there), of those that are either, as scikit-learn's
    ``f1_score(average="macro")``. A mean of the F1 of batches, or of ranks, is another number.

    Args:
        num_labels: K.
    """

    def __init__(self, num_labels: int) -> None:
        self.num_labels = num_labels
        self.reset()

    def reset(self) -> None:
        self.counts_KK = torch.zeros(self.num_labels, self.num_labels, dtype=torch.int64)

    def update(self, labels_B: torch.Tensor, predicted_B: torch.Tensor) -> None:
        """Count a batch, on the device that it is on."""
        counts = torch.bincount(labels_B * self.num_labels + predicted_B, minlength=self.num_labels**2)
        self.counts_KK = self.counts_KK.to(counts.device) + counts.view(self.num_labels, self.num_labels)

    def per_slot_reduce(self) -> list[list[int]]:
        counts: list[list[int]] = self.counts_KK.tolist()
        return counts

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        counts_KK = np.sum(per_slot_metrics, axis=0)
        either_K = counts_KK.sum(axis=0) + counts_KK.sum(axis=1)
        present_K = either_K > 0
        f1_K = 2 * np.diagonal(counts_KK)[present_K] / either_K[present_K]
        return float(np.mean(f1_K)) if len(f1_K) else 0.0
