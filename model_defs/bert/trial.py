"""BERT under DeepSpeed, data parallel with ZeRO: which class a text is of.

Legend of shape suffixes: B batch, T tokens, K classes; of KK the first is true, the second predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn import functional

from determined_ds import DataLoader, DataParallelTrial
from model_defs.bert.data import load_texts
from model_defs.bert.model import HEAD, Options, bert_config
from model_defs.common.classifier import build_classifier
from model_defs.common.metrics import OfSums
from model_defs.common.parameters import decay_groups
from model_defs.common.sections import parse_section


class BertTrial(DataParallelTrial):
    """``BertForSequenceClassification``, replicated."""

    validation_metrics = ("validation_loss", "validation_accuracy", "validation_f1")

    def __init__(self, context: Any) -> None:
        super().__init__(context)
        self.f1 = context.wrap_reducer(MacroF1(), name="validation_f1", for_training=False)

    def prepare(self) -> None:
        hparams = self.context.get_hparams()
        own = self.options = parse_section(Options, hparams)
        self.data = load_texts(self.context.get_data_config(), own.sequence_length, pretrained=own.pretrained)
        tokenizer = self.data.tokenizer
        self.config = bert_config(
            own, self.data.classes, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
        )

    def build_model(self) -> torch.nn.Module:
        kind, seed = transformers.BertForSequenceClassification, self.context.get_trial_seed()
        return build_classifier(kind, self.options, self.config, head=HEAD, seed=seed)

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        tokens_BT, mask_BT, labels_B = batch
        return functional.cross_entropy(self.logits(model, tokens_BT, mask_BT), labels_B)

    def evaluate(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        tokens_BT, mask_BT, labels_B = batch
        logits_BK = self.logits(model, tokens_BT, mask_BT)
        predicted_B = logits_BK.argmax(-1)
        num_labels = self.config.num_labels
        counts = torch.bincount(labels_B * num_labels + predicted_B, minlength=num_labels**2)
        self.f1.update(counts.view(num_labels, num_labels))
        return {
            "validation_loss": functional.cross_entropy(logits_BK, labels_B),
            "validation_accuracy": (predicted_B == labels_B).float().mean(),
        }

    @staticmethod
    def logits(model: Any, tokens_BT: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        """logits_BK in float32, whatever the model computes in."""
        # As attention takes it: of a flat mask, transformers asks the device in every step whether it hides anything.
        mask_B11T = mask_BT[:, None, None, :]
        logits_BK: torch.Tensor = model(input_ids=tokens_BT, attention_mask=mask_B11T).logits.float()
        return logits_BK

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation)

    def export_files(self, folder: Path) -> None:
        self.data.tokenizer.save_pretrained(folder)

    def tokens_per_sample(self) -> int:
        return self.options.sequence_length


class MacroF1(OfSums):
    """The mean over classes of 2 x true positives / (predicted + there), of those that are either.

    As scikit-learn's ``f1_score(average="macro")``; a mean of the F1 of batches, or of ranks, is another number.
    """

    def metric(self, counts_KK: torch.Tensor) -> float:
        either_K = counts_KK.sum(0) + counts_KK.sum(1)
        present_K = either_K > 0
        return float((2 * counts_KK.diagonal()[present_K] / either_K[present_K]).mean())
