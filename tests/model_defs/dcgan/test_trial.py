"""Two engines in one trial: a resumed run is the whole one; any folder of images; the Fréchet distance."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from model_defs.dcgan.data import load_images
from model_defs.dcgan.trial import FrechetDistance, features, frechet_distance
from tests.harness.ranks import Ranks
from tests.model_defs.training import reported, train
from tests.package import checkpoints, refusal

STEPS = 4
HPARAMS = {
    "global_batch_size": 64,
    "deepspeed_config": "experiments/deepspeed/zero1.json",
    "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
    "generator_zero_stage": 2,
    "discriminator_learning_rate": 0.002,
    "learning_rate": 0.001,
    "warmup_num_steps": 2,
    "image_size": 8,
    "latent_size": 8,
    "generator_features": 8,
    "discriminator_features": 8,
}


def steps_of_engines(trial: Any) -> dict[str, int]:
    return {name: engine.global_steps for name, engine in trial.engines.items()}


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_resumed_run_is_the_whole_one(num_workers: int, two_ranks: Ranks, tmp_path: Path) -> None:
    """Each engine under another stage, and latents that are drawn."""
    data, whole, parts = {"num_workers": num_workers}, tmp_path / "whole", tmp_path / "parts"
    half = STEPS // 2
    two_ranks.run(train, whole, "dcgan", HPARAMS, data, STEPS, period=half)
    two_ranks.run(train, parts, "dcgan", HPARAMS, data, half)
    (latest,) = checkpoints(parts)
    steps = two_ranks.run(
        *(train, parts, "dcgan", HPARAMS, data, STEPS),
        period=half,
        latest_checkpoint=latest.name,
        then=steps_of_engines,
    )
    assert steps == [{"generator": STEPS, "discriminator": STEPS}] * 2
    for name in ("d_loss", "g_loss", "loss"):
        assert reported(parts, name) == reported(whole, name), name
        assert len(reported(parts, name)) == STEPS
    for name in ("validation_d_loss", "validation_g_loss", "validation_frechet_distance"):
        assert reported(parts, name, group="validation") == reported(whole, name, group="validation"), name


def test_images_in_tensorboard_and_both_engines_in_the_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one_rank.run(train, tmp_path, "dcgan", HPARAMS, {}, STEPS, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("generated")
    assert (image.step, image.width, image.height) == (STEPS, 64, 64)
    (checkpoint,) = checkpoints(tmp_path)
    assert {"model0", "model1"} <= {path.name for path in checkpoint.iterdir()}


def test_a_folder_at_any_depth(tmp_path: Path) -> None:
    """One without enough images, and an image that cannot be read, are named."""
    for index in range(12):
        folder = tmp_path / ("a" if index % 2 else "b/c")
        folder.mkdir(parents=True, exist_ok=True)
        image = Image.new("RGB", (20, 10), (index, 0, 255))
        image.paste((9, 9, 9), (0, 0, 3, 10))  # falls away: the middle is cut out
        image.save(folder / f"{index}.png")
        if not index:
            assert (
                "holds 1 images"
                in refusal(lambda: load_images({"path": str(tmp_path)}, image_size=8)).message
            )
    (tmp_path / "notes.txt").write_text("not an image")
    (tmp_path / ".hidden.png").write_bytes(b"")
    section = {"path": str(tmp_path), "validation_fraction": 0.4}
    train, validation, *_ = load_images(section, image_size=8)
    assert len(train) + len(validation) == len({*train.images, *validation.images}) == 12
    assert train[0].shape == (3, 8, 8)
    assert (train[0][1].max(), train[0][2].min()) == (-1, 1)
    assert load_images({**section, "num_colours": 1}, image_size=8).train[0].shape == (1, 8, 8)
    (tmp_path / "a/1.png").write_bytes(b"no image")
    found = refusal(lambda: [side[index] for side in (train, validation) for index in range(len(side))])
    assert found.value == str(tmp_path / "a/1.png")


def test_the_distance_is_of_all_ranks_together() -> None:
    """Shared out unevenly, with a rank that has nothing, it is what one rank computes; and what numpy does."""
    torch.manual_seed(0)
    real, generated = torch.rand(40, 1, 8, 8), torch.rand(40, 1, 8, 8) * 0.5
    whole, first, second, idle = (FrechetDistance() for _ in range(4))
    for reducer, places in (
        (whole, slice(40)),
        (first, slice(7)),
        (second, slice(7, 20)),
        (second, slice(20, 40)),
    ):
        reducer.update(real[places], generated[places])
    alone = whole.cross_slot_reduce([whole.per_slot_reduce()])
    shared = whole.cross_slot_reduce([each.per_slot_reduce() for each in (first, idle, second)])
    assert shared == pytest.approx(alone, rel=1e-9)
    sides = [features(images) for images in (real, generated)]
    moments = [each.mean(0) for each in sides], [torch.cov(each.T, correction=0) for each in sides]
    assert alone == pytest.approx(frechet_distance(*moments), rel=1e-6)
