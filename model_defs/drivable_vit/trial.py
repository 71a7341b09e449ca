"""The drivable-space transformer under DeepSpeed: replicas, under ZeRO 0 to 3."""

from __future__ import annotations

from typing import Any

import deepspeed
import torch
from determined.pytorch import MetricReducer

from determined_ds import DataLoader, DataParallelTrial
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
        hparams = self.context.get_hparams()
        seed = self.context.get_trial_seed()
        # First alone: what is wrong with the sizes should not wait for the data to be found.
        sizes = model_config(hparams)
        self.data = load_data(self.context.get_data_config(), img_size=sizes.img_size, seed=seed)
        self.config = model_config(hparams, num_views=self.data.num_views, num_moments=self.data.num_moments)
        self.activation_checkpointing = bool(hparams.get("activation_checkpointing", False))

    def build_model(self) -> torch.nn.Module:
        checkpoint = deepspeed.checkpointing.checkpoint if self.activation_checkpointing else None
        return DrivableViT(self.config, seed=self.context.get_trial_seed(), checkpoint=checkpoint)

    def initialize(self, model: torch.nn.Module, ds_config: dict[str, Any]) -> Any:
        if self.activation_checkpointing:
            # With the options of the JSON's activation_checkpointing section.
            deepspeed.checkpointing.configure(None, deepspeed_config=ds_config)
        return super().initialize(model, ds_config)

    def build_parameters(self, model: torch.nn.Module) -> list[dict[str, Any]]:
        return decay_groups(model)

    def loss(self, model: Any, batch: Any) -> torch.Tensor:
        pixels_BMVCHW, masks_BMVHW = batch
        return mask_loss(model(pixels_BMVCHW), masks_BMVHW)

    def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
        pixels_BMVCHW, masks_BMVHW = batch
        logits_BMVHW = model(pixels_BMVCHW)
        predicted, target = logits_BMVHW > 0, masks_BMVHW > 0
        self.iou.update(predicted, target)
        return {
            "validation_loss": mask_loss(logits_BMVHW, masks_BMVHW),
            "validation_pixel_accuracy": (predicted == target).float().mean(),
        }

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train, num_workers=self.data.num_workers)

    def build_validation_data_loader(self) -> DataLoader:
        return self.validation_loader(self.data.validation, num_workers=self.data.num_workers)


class IoU(MetricReducer):
    """Intersection over union of all samples on all ranks: a ratio of sums, not a mean of ratios."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.counts: torch.Tensor | None = None

    def update(self, predicted: torch.Tensor, target: torch.Tensor) -> None:
        """Count the pixels of a batch, two bool tensors of one shape; the sums stay on the device."""
        counts = torch.stack([(predicted & target).sum(), (predicted | target).sum()])
        self.counts = counts if self.counts is None else self.counts + counts

    def per_slot_reduce(self) -> list[int]:
        return [0, 0] if self.counts is None else self.counts.tolist()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        """1 where there is nothing to find and nothing was found."""
        intersection, union = (sum(counts) for counts in zip(*per_slot_metrics, strict=True))
        return intersection / union if union else 1.0
