"""The drivable-space transformer under DeepSpeed: replicas, under ZeRO 0 to 3."""

from __future__ import annotations

from typing import Any

import torch

from determined_ds import DataLoader, DataParallelTrial
from model_defs.common.metrics import OfSums
from model_defs.common.parameters import decay_groups
from model_defs.drivable_vit.data import load_data
from model_defs.drivable_vit.model import DrivableViT, mask_loss, model_config


class DrivableViTTrial(DataParallelTrial):
    """Learns which pixels show ground to drive on, by binary cross entropy; judged by intersection over union."""

    validation_metrics = ("validation_iou", "validation_loss", "validation_pixel_accuracy")

    def __init__(self, context: Any) -> None:
        self.iou = context.wrap_reducer(IoU(), name="validation_iou", for_training=False)
        super().__init__(context)

    def prepare(self) -> None:
        seed = self.context.get_trial_seed()
        self.config = model_config(self.context.get_hparams())
        self.data = load_data(self.context.get_data_config(), img_size=self.config.img_size, seed=seed)

    def build_model(self) -> torch.nn.Module:
        return DrivableViT(
            self.config,
            num_views=self.data.num_views,
            num_moments=self.data.num_moments,
            seed=self.context.get_trial_seed(),
        )

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        pixels_BMVCHW, masks_BMVHW = batch
        return mask_loss(model(pixels_BMVCHW), masks_BMVHW)

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        pixels_BMVCHW, masks_BMVHW = batch
        logits_BMVHW = model(pixels_BMVCHW)
        predicted, target = logits_BMVHW > 0, masks_BMVHW > 0
        self.iou.update(torch.stack([(predicted & target).sum(), (predicted | target).sum()]))
        return {
            "validation_loss": mask_loss(logits_BMVHW, masks_BMVHW),
            "validation_pixel_accuracy": (predicted == target).float().mean(),
        }

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train, num_workers=self.data.num_workers)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation, num_workers=self.data.num_workers)


class IoU(OfSums):
    """Intersection over union; 1 where there is nothing to find and nothing was found."""

    def metric(self, counts_2: torch.Tensor) -> float:
        intersection, union = counts_2.tolist()
        return intersection / union if union else 1.0
