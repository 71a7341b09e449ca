"""ViT under DeepSpeed, data parallel with ZeRO: which class an image is of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch.nn import functional

from determined_ds import DataLoader, DataParallelTrial
from model_defs.common.classifier import parse_options
from model_defs.common.parameters import decay_groups
from model_defs.vit.data import EpochSampler, load_images, normalization
from model_defs.vit.model import NO_DECAY, Options, build_vit, vit_config


class ViTTrial(DataParallelTrial):
    """``ViTForImageClassification``, replicated."""

    def prepare(self) -> None:
        only_sizes = self.context.device.type == "meta"
        self.options = parse_options(Options, self.context.get_hparams())
        self.data = load_images(self.context.get_data_config())
        self.config = vit_config(self.options, self.data.classes, only_sizes=only_sizes)
        mean, std = self.normalization = normalization(None if only_sizes else self.options.pretrained)
        seed, side = self.context.get_trial_seed(), self.config.image_size
        self.train, self.validation = self.data.datasets(image_size=side, seed=seed, mean=mean, std=std)

    def build_model(self) -> torch.nn.Module:
        return build_vit(self.options, self.config, self.context.get_trial_seed())

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
        mean, std = self.normalization
        processor = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": self.config.image_size, "width": self.config.image_size},
            "resample": int(Image.Resampling.BILINEAR),
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(mean),
            "image_std": list(std),
        }
        (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2) + "\n")

    def build_training_data_loader(self) -> DataLoader:
        sampler = EpochSampler(len(self.train))
        return self.training_loader(
            self.train, shuffle=False, sampler=sampler, num_workers=self.data.num_workers
        )

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.validation, num_workers=self.data.num_workers)
