"""DCGAN under DeepSpeed: a generator and a discriminator, each under an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from determined_ds import DataLoader, SeveralEnginesTrial
from model_defs.common.metrics import OfSums
from model_defs.dcgan.data import WithLatents, load_images
from model_defs.dcgan.model import (
    Discriminator,
    Generator,
    dcgan_config,
    discriminator_loss,
    generator_loss,
)

GRID = 8  # cells a side; of 8 x 8 digits, the features are their pixels


class DCGANTrial(SeveralEnginesTrial):
    """The discriminator learns to tell real images from generated ones, the generator to be mistaken.

    Legend of shape suffixes: K micro-batches of a step, B images, Z latent numbers, C colours, H height, W width.
    """

    validation_metrics = (
        "validation_frechet_distance",
        "validation_loss",
        "validation_d_loss",
        "validation_g_loss",
        "validation_d_accuracy",
    )

    def __init__(self, context: Any) -> None:
        self.distance = context.wrap_reducer(
            FrechetDistance(), name="validation_frechet_distance", for_training=False
        )
        super().__init__(context)

    def prepare(self) -> None:
        self.config = dcgan_config(self.context.get_hparams())
        self.data = load_images(self.context.get_data_config(), image_size=self.config.image_size)

    def build_models(self) -> dict[str, nn.Module]:
        kinds, seed = {"generator": Generator, "discriminator": Discriminator}, self.context.get_trial_seed()
        return {
            name: kind(self.config, num_colours=self.data.num_colours, seed=seed)
            for name, kind in kinds.items()
        }

    def train_batch(
        self, dataloader_iter: Iterator[Any] | None, epoch_idx: int, batch_idx: int
    ) -> dict[str, Any]:
        """One step of the discriminator, then one of the generator, each over all its micro-batches.

        The generator's weights stay while the discriminator accumulates, and the other way round: so any number
        of micro-batches makes the step that one whole batch would.
        """
        assert dataloader_iter is not None
        num_micro_batches = self.resolved.batch.accumulation
        real_KBCHW = [self._on_device(next(dataloader_iter)) for _ in range(num_micro_batches)]
        # At once and on the CPU: the same numbers for any micro-batch size and device.
        latents = torch.randn(sum(map(len, real_KBCHW)), self.config.latent_size)
        latents_KBZ = self._on_device(latents).split([len(real) for real in real_KBCHW])
        generator, discriminator = self.engines["generator"], self.engines["discriminator"]
        d_losses, g_losses = [], []
        for real_BCHW, latents_BZ in zip(real_KBCHW, latents_KBZ, strict=True):
            with torch.no_grad():
                generated_BCHW = generator.module(latents_BZ)
            # In one pass: an engine counts on one forward before each backward.
            logits = discriminator(torch.cat([real_BCHW, generated_BCHW.to(real_BCHW.dtype)]))
            loss = discriminator_loss(*logits.split(len(real_BCHW)))
            discriminator.backward(loss)
            discriminator.step()  # at the last micro-batch
            d_losses.append(loss.detach())
        judge = discriminator.module
        judge.requires_grad_(False)  # or its engine would add the gradients to its own
        try:
            for latents_BZ in latents_KBZ:
                # Past the judge's engine: this backward pass is not its own.
                loss = generator_loss(judge(generator(latents_BZ)))
                generator.backward(loss)
                generator.step()
                g_losses.append(loss.detach())
        finally:
            judge.requires_grad_(True)
        d_loss, g_loss = torch.stack(d_losses).mean(), torch.stack(g_losses).mean()
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}

    def _on_device(self, batch: Any) -> Any:
        return self.context.to_device(batch)

    def evaluate_batch(self, dataloader_iter: Iterator[Any] | None, batch_idx: int) -> dict[str, Any]:
        """Both losses, how often the discriminator is right on images it never saw, and the Fréchet distance."""
        assert dataloader_iter is not None
        real_BCHW, latents_BZ = self._on_device(next(dataloader_iter))
        generated_BCHW = self.engines["generator"].module(latents_BZ).to(real_BCHW.dtype)
        logits = self.engines["discriminator"].module(torch.cat([real_BCHW, generated_BCHW]))
        real_B, generated_B = logits.split(len(real_BCHW))
        self.distance.update(torch.stack([sums_of(real_BCHW), sums_of(generated_BCHW)]))
        d_loss, g_loss = discriminator_loss(real_B, generated_B), generator_loss(generated_B)
        right = torch.cat([real_B > 0, generated_B <= 0])
        return {
            "validation_loss": d_loss + g_loss,
            "validation_d_loss": d_loss,
            "validation_g_loss": g_loss,
            "validation_d_accuracy": right.float().mean(),
        }

    def build_training_data_loader(self) -> DataLoader:
        return self.training_loader(self.data.train, num_workers=self.data.num_workers)

    def build_validation_data_loader(self) -> DataLoader:
        seed = self.context.get_trial_seed()
        images = WithLatents(self.data.validation, self.config.latent_size, seed)
        return self.validation_loader(images, num_workers=self.data.num_workers)


def sums_of(images_BCHW: Tensor) -> Tensor:
    """Sums over images of their features, which are the colours averaged over the cells of a grid.

    The number, the sum and the sum of products, in one matrix: that of (1, features) with itself.
    """
    values_BF = functional.adaptive_avg_pool2d(images_BCHW.float(), GRID).flatten(1).double()
    with_one = torch.cat([torch.ones_like(values_BF[:, :1]), values_BF], dim=1)
    return with_one.T @ with_one


class FrechetDistance(OfSums):
    """How far generated images are from real ones, as two normal distributions of their features.

    |mean difference|² + trace(C1 + C2 - 2 (C1 C2)^1/2), of pixels in [-1, 1]; 0 where both distributions agree.
    The sums are :func:`sums_of` all real images, and of all generated ones.

    Source of the measure: Dowson and Landau, 1982; on Inception's features it is the FID of arXiv 1706.08500.
    """

    def metric(self, sums_2FF: Tensor) -> float:
        means_2F = sums_2FF[:, 0, 1:] / sums_2FF[:, :1, 0]
        products_2FF = sums_2FF[:, 1:, 1:] / sums_2FF[:, :1, :1]
        real_FF, generated_FF = products_2FF - means_2F[:, :, None] * means_2F[:, None, :]
        eigenvalues, vectors = torch.linalg.eigh(real_FF)
        root = (vectors * eigenvalues.clamp(min=0).sqrt()) @ vectors.T
        # The eigenvalues of C1 C2 are those of this symmetric matrix.
        of_both = torch.linalg.eigvalsh(root @ generated_FF @ root).clamp(min=0)
        apart = (means_2F[0] - means_2F[1]).square().sum()
        return float(apart + real_FF.trace() + generated_FF.trace() - 2 * of_both.sqrt().sum())
