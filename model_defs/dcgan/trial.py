"""DCGAN under DeepSpeed: a generator and a discriminator, each under an engine of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from determined.pytorch import MetricReducer, PyTorchCallback
from torch import Tensor, nn
from torch.nn import functional

from determined_ds import DataLoader, SeveralEnginesTrial
from model_defs.dcgan.data import WithLatents, latents_of, load_images
from model_defs.dcgan.model import (
    Discriminator,
    Generator,
    dcgan_config,
    discriminator_loss,
    generator_loss,
)

NUM_SAMPLES = 64  # generated for TensorBoard
SAMPLES_A_ROW = 8
SAMPLES_SEED = 1  # latents of the images for TensorBoard; those for validation have the trial's seed
GRID = 8  # features of an image are its colours on a grid of so many cells a side


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
        hparams = self.context.get_hparams()
        # First alone: what is wrong with the sizes should not wait for the data to be found.
        sizes = dcgan_config(hparams)
        self.data = load_images(self.context.get_data_config(), image_size=sizes.image_size)
        self.config = dcgan_config(hparams, num_colours=self.data.num_colours)

    def build_models(self) -> dict[str, nn.Module]:
        seed = self.context.get_trial_seed()
        return {
            "generator": Generator(self.config, seed=seed),
            "discriminator": Discriminator(self.config, seed=seed),
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
        self.distance.update(real_BCHW, generated_BCHW)
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

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"samples": SamplesToTensorBoard(self)}

    @torch.no_grad()
    def samples(self) -> Tensor:
        """images_BCHW of the same 64 latents each time, in [-1, 1], on the CPU; under ZeRO 3 a collective."""
        latents = [latents_of(SAMPLES_SEED, index, self.config.latent_size) for index in range(NUM_SAMPLES)]
        latents_BZ = self._on_device(torch.stack(latents))
        return self.engines["generator"].module(latents_BZ).float().cpu()


class SamplesToTensorBoard(PyTorchCallback):
    """After each validation, one image of all samples as ``generated``, in the writer that the metrics go to."""

    def __init__(self, trial: DCGANTrial) -> None:
        self.trial = trial

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        context = self.trial.context
        images_BCHW = self.trial.samples()  # on every rank: it may be a collective
        if context.distributed.rank == 0 and context.get_enable_tensorboard_logging():
            rows = [torch.cat(list(row), dim=2) for row in images_BCHW.split(SAMPLES_A_ROW)]
            image_CHW = (torch.cat(rows, dim=1) + 1) / 2
            step = context.current_train_batch() + 1
            context.get_tensorboard_writer().add_image("generated", image_CHW, step)


class FrechetDistance(MetricReducer):
    """How far generated images are from real ones, as two normal distributions of their features.

    |mean difference|² + trace(C1 + C2 - 2 (C1 C2)^1/2), of pixels in [-1, 1]; 0 where both distributions agree.
    Sums of features and of their products are added up over samples and ranks, and only then divided.

    Source of the measure: Dowson and Landau, 1982; on Inception's features it is the FID of arXiv 1706.08500.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.sums: Tensor | None = None

    def update(self, real_BCHW: Tensor, generated_BCHW: Tensor) -> None:
        """Count the images of a batch."""
        sums = []
        for images_BCHW in (real_BCHW, generated_BCHW):
            values_BF = features(images_BCHW)
            # Their number, sum and sum of products, in one matrix: that of (1, features) with itself.
            with_one = torch.cat([torch.ones_like(values_BF[:, :1]), values_BF], dim=1)
            sums.append(with_one.T @ with_one)
        added = torch.stack(sums)
        self.sums = added if self.sums is None else self.sums + added

    def per_slot_reduce(self) -> Tensor | None:
        return None if self.sums is None else self.sums.cpu()

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        sums: Any = sum(each for each in per_slot_metrics if each is not None)
        means_F, covariances_FF = [], []
        for of_side in sums:
            mean_F = of_side[0, 1:] / of_side[0, 0]
            means_F.append(mean_F)
            covariances_FF.append(of_side[1:, 1:] / of_side[0, 0] - torch.outer(mean_F, mean_F))
        return frechet_distance(means_F, covariances_FF)


def features(images_BCHW: Tensor) -> Tensor:
    """features_BF: an image's colours, averaged over the cells of a grid; of 8 x 8 digits, their pixels."""
    return functional.adaptive_avg_pool2d(images_BCHW.float(), GRID).flatten(1).double()


def frechet_distance(means_F: list[Tensor], covariances_FF: list[Tensor]) -> float:
    """Between two normal distributions, by their means and covariances in float64."""
    eigenvalues, vectors = torch.linalg.eigh(covariances_FF[0])
    root = (vectors * eigenvalues.clamp(min=0).sqrt()) @ vectors.T
    # The eigenvalues of C1 C2 are those of this symmetric matrix.
    of_both = torch.linalg.eigvalsh(root @ covariances_FF[1] @ root).clamp(min=0)
    apart = (means_F[0] - means_F[1]).square().sum()
    return float(apart + sum(each.trace() for each in covariances_FF) - 2 * of_both.sqrt().sum())
