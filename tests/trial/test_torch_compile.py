"""``torch_compile: true`` compiles the model, whatever trains it, and trains the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

STEPS = 5
SAMPLES = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
DATA = [(sample, sample.sum(0, keepdim=True).sin()) for sample in SAMPLES]


def layers() -> list[torch.nn.Module]:
    """Torch's own alone, which torch passes over unless it is called from code that is not its own."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        ends = (torch.nn.Linear(3, 16), torch.nn.Linear(16, 1))
        return [ends[0], torch.nn.GELU(), torch.nn.LayerNorm(16), ends[1]]


def trial_class(stages: int) -> Any:
    from determined_ds import DataParallelTrial, PipelineTrial

    class Loaders:
        def build_training_data_loader(self: Any) -> Any:
            return self.training_loader(DATA, shuffle=False)

        def build_validation_data_loader(self: Any) -> Any:
            return self.validation_loader(DATA[:11])

    class Replicated(Loaders, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return torch.nn.Sequential(*layers())

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    class Piped(Loaders, PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            return layers()

        def loss(self, outputs: Any, targets: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(outputs, targets)

    return Piped if stages > 1 else Replicated


def hyperparameters(torch_compile: bool, stages: int = 1, schedule: str = "1f1b") -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "pipe_parallel_size": stages,
        "pipe_schedule": schedule,
        "learning_rate": 0.02,
        "torch_compile": torch_compile,
        "deepspeed_config": {
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": int(stages == 1)},
        },
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2 * stages},
    }


def train(run_dir: Path, cache_dir: Path, engine: str, hparams: dict[str, Any]) -> tuple[list[float], int]:
    """In a rank: the losses of some steps, and the graphs that torch compiled on the way."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(cache_dir)
    import torch._dynamo
    from torch._dynamo.utils import counters

    from determined_ds import open_context

    torch._dynamo.reset()
    counters.clear()
    stages = hparams["pipe_parallel_size"]
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine=engine) as context:
        trial = trial_class(stages)(context)
        rank, replicas = (0, 1) if stages > 1 else (context.distributed.rank, 2)
        batches = (
            tuple(map(torch.stack, zip(*DATA[i : i + trial.micro_batch_size], strict=True)))
            for i in range(rank, 40, replicas)
        )
        calls = STEPS * (1 if stages > 1 else 2)
        losses = [float(trial.train_batch(batches, 0, index)["loss"]) for index in range(calls)]
    return losses, counters["stats"]["unique_graphs"]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of what is compiled: the user's own stays as it is, and nothing is found in it that hides a fault."""
    return tmp_path_factory.mktemp("compiled")


@pytest.mark.long("torch's compiler takes half a minute")
@pytest.mark.parametrize(
    ("engine", "stages", "schedule"),
    [
        ("deepspeed", 1, "1f1b"),
        ("ddp", 1, "1f1b"),
        ("deepspeed", 2, "1f1b"),
        ("deepspeed", 2, "dualpipev"),
        ("deepspeed", 2, "zb-h1"),
    ],
    ids=["ZeRO 1", "ddp", "pipeline", "dualpipev", "zb-h1"],
)
def test_compiled_it_trains_the_same(
    two_ranks: Ranks, cache_dir: Path, tmp_path: Path, engine: str, stages: int, schedule: str
) -> None:
    plain, compiled = (
        two_ranks.run(train, tmp_path, cache_dir, engine, hyperparameters(on, stages, schedule))
        for on in (False, True)
    )
    for (wanted, no_graphs), (losses, graphs) in zip(plain, compiled, strict=True):
        assert losses == pytest.approx(wanted, rel=1e-4)
        assert losses[-1] != losses[0]
        assert no_graphs == 0
        assert graphs > 0, "and it was compiled"


def build(run_dir: Path, path: str) -> str:
    """In a rank: what is said of a machine whose programs are found in ``path``."""
    from determined_ds import open_context
    from determined_ds.errors import ConfigError

    os.environ["PATH"] = path
    with open_context(hparams=hyperparameters(True), run_dir=run_dir, accelerator="cpu") as context:
        try:
            trial_class(1)(context)
        except ConfigError as error:
            return str(error)
    return ""


def test_without_a_compiler_it_is_refused_at_once(one_rank: Ranks, tmp_path: Path) -> None:
    (said,) = one_rank.run(build, tmp_path, str(tmp_path))
    assert "hyperparameters.torch_compile = true" in said
    assert "missing: C++ compiler (g++)" in said
    assert "apt install g++" in said
    assert "torch_compile: false" in said
