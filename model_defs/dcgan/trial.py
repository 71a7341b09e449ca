"""DCGAN under DeepSpeed: a generator and a discriminator, each under an engine of its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from determined.pytorch import PyTorchCallback
from torch import Tensor, nn

from determined_ds import DataLoader, SeveralEnginesTrial
from model_defs.dcgan.data import WithLatents, latents_of, load_images
from model_defs.dcgan.frechet import FrechetDistance
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
        d_losses = [
            self._discriminator_step(real, latents)
            for real, latents in zip(real_KBCHW, latents_KBZ, strict=True)
        ]
        g_losses = [self._generator_step(latents) for latents in latents_KBZ]
        d_loss, g_loss = torch.stack(d_losses).mean(), torch.stack(g_losses).mean()
        return {"loss": d_loss + g_loss, "d_loss": d_loss, "g_loss": g_loss}

    def _on_device(self, batch: Any) -> Any:
        return self.context.to_device(batch)

    def _discriminator_step(self, real_BCHW: Tensor, latents_BZ: Tensor) -> Tensor:
        """Forward and backward; the engine steps at the last micro-batch."""
        engine = self.engines["discriminator"]
        with torch.no_grad():
            generated_BCHW = self.engines["generator"].module(latents_BZ)
        # In one pass: an engine counts on one forward before each backward.
        logits = engine(torch.cat([real_BCHW, generated_BCHW.to(real_BCHW.dtype)]))
        loss = discriminator_loss(*logits.split(len(real_BCHW)))
        engine.backward(loss)
        engine.step()
        return loss.detach()

    def _generator_step(self, latents_BZ: Tensor) -> Tensor:
        engine = self.engines["generator"]
        judge = self.engines["discriminator"].module
        with _frozen(judge):
            # Past the judge's engine: this backward pass is not its own.
            loss = generator_loss(judge(engine(latents_BZ)))
            engine.backward(loss)
        engine.step()
        return loss.detach()

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
    """After each validation, generated images as ``generated``, in the writer that the metrics go to.

    ``context.get_tensorboard_writer`` writes to the run directory's ``tensorboard/`` off-cluster; on a cluster the
    loop uploads what it wrote.
    """

    def __init__(self, trial: DCGANTrial) -> None:
        self.trial = trial

    def on_validation_end(self, metrics: dict[str, Any]) -> None:
        context = self.trial.context
        images_BCHW = self.trial.samples()  # on every rank: it may be a collective
        if context.distributed.rank == 0 and context.get_enable_tensorboard_logging():
            step = context.current_train_batch() + 1
            context.get_tensorboard_writer().add_image("generated", tiled(images_BCHW), step)


def tiled(images_BCHW: Tensor) -> Tensor:
    """One image_CHW in [0, 1], with eight of the images a row."""
    rows = [torch.cat(list(row), dim=2) for row in images_BCHW.split(SAMPLES_A_ROW)]
    return (torch.cat(rows, dim=1) + 1) / 2


@contextlib.contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """No gradient for a model's parameters: its engine would add it to its own."""
    model.requires_grad_(False)
    try:
        yield
    finally:
        model.requires_grad_(True)
