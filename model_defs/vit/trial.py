"""ViT under DeepSpeed, data parallel with ZeRO: which class an image is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image
from torch.nn import functional

from determined_ds import DataLoader, DataParallelTrial
from model_defs.common.classifier import build_classifier, classifier_config
from model_defs.common.parameters import decay_groups
from model_defs.common.sections import parse_section
from model_defs.vit.data import Images, load_images, normalization_of
from model_defs.vit.model import HEAD, MODEL_SIZES, NO_DECAY, Options


class ViTTrial(DataParallelTrial):
    """``ViTForImageClassification``, replicated."""

    def prepare(self) -> None:
        self.options = parse_section(Options, self.context.get_hparams())
        data = load_images(self.context.get_data_config())
        sizes = MODEL_SIZES[self.options.model_size]
        self.config = classifier_config(transformers.ViTConfig, self.options, data.classes, **sizes)
        self.normalization, self.num_workers = normalization_of(self.options.pretrained), data.num_workers
        side = self.config.image_size
        self.train = Images(data.train, side, self.normalization, data.augmentation)
        self.validation = Images(data.validation, side, self.normalization)

    def build_model(self) -> torch.nn.Module:
        kind, seed = transformers.ViTForImageClassification, self.context.get_trial_seed()
        return build_classifier(kind, self.options, self.config, head=HEAD, seed=seed)

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model, NO_DECAY)

    def loss(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        pixels_BCHW, labels_B = batch
        logits_BK = model(pixels_BCHW).logits.float()
        accuracy = (logits_BK.argmax(-1) == labels_B).float().mean()
        return {"loss": functional.cross_entropy(logits_BK, labels_B), "accuracy": accuracy}

    def evaluate(self, model: Any, batch: Any) -> dict[str, torch.Tensor]:
        metrics = self.loss(model, batch)
        return {"validation_loss": metrics["loss"], "validation_accuracy": metrics["accuracy"]}

    def export_files(self, folder: Path) -> None:
        """``preprocessor_config.json``, by which Hugging Face prepares images as validation does here."""
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.config.image_size, "width": self.config.image_size},
            "resample": int(Image.Resampling.BILINEAR),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(self.normalization.mean),
            "image_std": list(self.normalization.std),
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.train, num_workers=self.num_workers)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.validation, num_workers=self.num_workers)
