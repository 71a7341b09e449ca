"""Two engines in one trial: however the batch and the states are split, a step is the same, and a resume exact."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.ranks import Ranks

STEPS = 4
# fp32 sums in another order.
TOLERANCE = 1e-4
NAMES = ("d_loss", "g_loss", "loss", "validation_d_loss", "validation_g_loss", "validation_frechet_distance")


class Way(NamedTuple):
    """How a run is carried out: the ZeRO stage of each engine, and how a replica's batch is cut."""

    generator: int = 1
    discriminator: int = 1
    accumulation: int = 1
    num_workers: int = 0


def hyperparameters(way: Way) -> dict[str, Any]:
    return {
        "global_batch_size": 64,
        "deepspeed_config": "experiments/deepspeed/zero0.json",
        "overwrite_deepspeed_args": {
            "gradient_accumulation_steps": way.accumulation,
            "gradient_clipping": 0.1,
        },
        "generator_deepspeed_config": f"experiments/deepspeed/zero{way.generator}.json",
        "discriminator_deepspeed_config": f"experiments/deepspeed/zero{way.discriminator}.json",
        "discriminator_learning_rate": 0.002,
        "learning_rate": 0.001,
        "warmup_num_steps": 2,
        "image_size": 8,
        "latent_size": 8,
        "generator_features": 8,
        "discriminator_features": 8,
    }


def train(run_dir: Path, way: Way, stop: int = STEPS, resume: bool = False) -> dict[str, Any]:
    """Train in this rank; what was reported since the run directory was made, and what each engine counted."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from model_defs.dcgan.trial import DCGANTrial

    with open_context(
        hparams=hyperparameters(way),
        exp_conf={"data": {"num_workers": way.num_workers}, "reproducibility": {"experiment_seed": 3}},
        run_dir=run_dir,
        accelerator="cpu",
    ) as context:
        found = sorted((run_dir / "checkpoints").iterdir()) if resume else []
        trial = DCGANTrial(context)
        Trainer(trial, context).fit(
            max_length=Batch(stop),
            reporting_period=Batch(1),
            validation_period=Batch(STEPS),
            checkpoint_period=Batch(STEPS // 2),
            checkpoint_policy="none",
            latest_checkpoint=found[-1].name if found else None,
        )
        steps = {name: engine.global_steps for name, engine in trial.engines.items()}
    lines = [json.loads(line)["metrics"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    reported = {name: [line[name] for line in lines if name in line] for name in NAMES}
    return {**reported, "steps": steps}


@pytest.fixture(scope="module")
def plain(two_ranks: Ranks, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Without ZeRO, a replica's batch at once."""
    return two_ranks.run(train, tmp_path_factory.mktemp("plain"), Way(generator=0, discriminator=0))[0]


@pytest.mark.parametrize(
    "way",
    [
        Way(generator=0, discriminator=0, accumulation=2),
        Way(generator=1, discriminator=1, accumulation=4),
        Way(generator=2, discriminator=1),
        Way(generator=1, discriminator=2, accumulation=2),
        Way(generator=3, discriminator=3),
        Way(generator=3, discriminator=3, accumulation=2),
    ],
    ids=str,
)
def test_a_step_does_not_depend_on_how_it_is_cut(
    way: Way, two_ranks: Ranks, plain: dict[str, Any], tmp_path: Path
) -> None:
    found = two_ranks.run(train, tmp_path, way)[0]
    assert found["steps"] == {"generator": STEPS, "discriminator": STEPS}
    assert len(found["d_loss"]) == STEPS
    for name in NAMES:
        assert found[name] == pytest.approx(plain[name], rel=TOLERANCE), name


@pytest.mark.parametrize("way", [Way(), Way(generator=2, accumulation=2, num_workers=1)], ids=str)
def test_a_resumed_run_is_the_whole_one(way: Way, two_ranks: Ranks, tmp_path: Path) -> None:
    whole = two_ranks.run(train, tmp_path / "whole", way)[0]
    two_ranks.run(train, tmp_path / "parts", way, stop=STEPS // 2)
    parts = two_ranks.run(train, tmp_path / "parts", way, resume=True)[0]
    for name in ("d_loss", "g_loss", "loss"):
        assert parts[name] == whole[name], name
    for name in NAMES:
        assert parts[name][-1] == whole[name][-1], name
    assert whole["d_loss"][0] != whole["d_loss"][1]


def test_images_in_tensorboard_and_both_engines_in_the_checkpoint(one_rank: Ranks, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    one_rank.run(train, tmp_path, Way())
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (image,) = events.Images("generated")
    assert (image.step, image.width, image.height) == (STEPS, 64, 64)
    assert all(
        {"model0", "model1"} <= {path.name for path in checkpoint.iterdir()}
        for checkpoint in (tmp_path / "checkpoints").iterdir()
    )
