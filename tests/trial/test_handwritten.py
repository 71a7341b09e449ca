"""A trial written by hand against Determined's API runs as it is, without a base class of ours.

What such trials do, from Determined's first examples on: read ``self.args`` from the hyperparameters, build the
engine with ``deepspeed.initialize(args=self.args)``, hand its MPU to the context *before* the engine, and let
``evaluate_batch`` go without an index. And a trial of ours stays one of Determined's: it runs under its Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks, free_port

WEIGHTS = torch.tensor([[1.0], [-2.0], [0.5]])
STEPS = 6


class Regression(torch.utils.data.Dataset[Any]):
    """Sample ``i``: three numbers, and what a linear model would make of them."""

    def __init__(self, size: int, seed: int) -> None:
        self.inputs = torch.randn(size, 3, generator=torch.Generator().manual_seed(seed))
        self.targets = self.inputs @ WEIGHTS

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index], self.targets[index]


TRAINING, VALIDATION = Regression(64, seed=1), Regression(11, seed=2)


def network() -> torch.nn.Sequential:
    """The same on every rank, whatever was drawn before."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def squared_error(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs, targets)


def hyperparameters(stages: int = 1) -> dict[str, Any]:
    return {
        "global_batch_size": 16,
        "pipe_parallel_size": stages,
        "deepspeed_config": {
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "gradient_accumulation_steps": "auto",
            "zero_optimization": {"stage": 0 if stages > 1 else 1},
            "optimizer": {"type": "Adam", "params": {"lr": 0.01, "torch_adam": True}},
        },
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": 2},
    }


def trial_classes() -> dict[str, Any]:
    """The trials, made where deepspeed is loaded: in a rank."""
    import deepspeed
    from attrdict import AttrDict
    from deepspeed.pipe import PipelineModule
    from determined.pytorch import DataLoader
    from determined.pytorch.deepspeed import DeepSpeedTrial

    from determined_ds import DataParallelTrial, DeepSpeedMPU

    class Loaders(DeepSpeedTrial):
        """What both trials by hand have in common: the data."""

        args: Any

        def build_training_data_loader(self) -> Any:
            return DataLoader(TRAINING, batch_size=self.args.train_micro_batch_size_per_gpu, shuffle=True)

        def build_validation_data_loader(self) -> Any:
            return DataLoader(VALIDATION, batch_size=self.args.train_micro_batch_size_per_gpu)

    class Replicated(Loaders):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.args = AttrDict(context.get_hparams())
            model = network()
            engine, *_ = deepspeed.initialize(
                args=self.args, model=model, model_parameters=model.parameters()
            )
            self.context.reconcile_ds_config(engine._config)
            self.mpu = self.context.wrap_mpu(DeepSpeedMPU(engine.mpu))
            self.engine = self.context.wrap_model_engine(engine)

        def train_batch(self, iter_dataloader: Any, epoch_idx: int, batch_idx: int) -> Any:
            inputs, targets = self.context.to_device(next(iter_dataloader))
            loss = squared_error(self.engine(inputs), targets)
            self.engine.backward(loss)
            self.engine.step()
            return {"loss": loss}

        def evaluate_batch(self, iter_dataloader: Any) -> Any:  # type: ignore[override]
            inputs, targets = self.context.to_device(next(iter_dataloader))
            return {"validation_loss": squared_error(self.engine(inputs), targets)}

    class Piped(Loaders):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.args = AttrDict(context.get_hparams())
            model = PipelineModule(
                layers=list(network()), num_stages=self.args.pipe_parallel_size, loss_fn=squared_error
            )
            engine, *_ = deepspeed.initialize(
                args=self.args, model=model, model_parameters=list(model.parameters())
            )
            self.context.reconcile_ds_config(engine._config)
            self.mpu = self.context.wrap_mpu(DeepSpeedMPU(engine.mpu))
            self.engine = self.context.wrap_model_engine(engine)

        def train_batch(self, iter_dataloader: Any, epoch_idx: int, batch_idx: int) -> Any:
            return {"loss": self.engine.train_batch(iter_dataloader)}

        def evaluate_batch(self, iter_dataloader: Any) -> Any:  # type: ignore[override]
            return {"validation_loss": self.engine.eval_batch(iter_dataloader)}

    class Overwritten(Replicated):
        """Builds its engine from a mapping, as trials do whose JSON is changed by the experiment."""

        def __init__(self, context: Any) -> None:
            self.context = context
            self.args = AttrDict(context.get_hparams())
            model = network()
            engine, *_ = deepspeed.initialize(
                model=model,
                model_parameters=model.parameters(),
                config=context.overwrite(hyperparameters()["deepspeed_config"]),
            )
            self.engine = self.context.wrap_model_engine(engine)

    class Stubborn(Replicated):
        """Has a configuration of its own."""

        def __init__(self, context: Any) -> None:
            self.context = context
            self.args = AttrDict(context.get_hparams())
            model = network()
            ds_config = {
                "train_batch_size": 16,
                "gradient_accumulation_steps": 2,
                "optimizer": hyperparameters()["deepspeed_config"]["optimizer"],
            }
            engine, *_ = deepspeed.initialize(
                model=model, model_parameters=model.parameters(), config=ds_config
            )
            self.engine = self.context.wrap_model_engine(engine)

    class Ours(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return network()

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return squared_error(model(batch[0]), batch[1])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(TRAINING)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(VALIDATION)

    return {
        "replicated": Replicated,
        "piped": Piped,
        "overwritten": Overwritten,
        "stubborn": Stubborn,
        "ours": Ours,
    }


def train(name: str, run_dir: Path, stages: int = 1) -> None:
    """Train in this rank."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    with open_context(hparams=hyperparameters(stages), run_dir=run_dir, accelerator="cpu") as context:
        trial = trial_classes()[name](context)
        Trainer(trial, context).fit(
            max_length=Batch(STEPS),
            reporting_period=Batch(1),
            validation_period=Batch(STEPS),
            checkpoint_policy="none",
        )


@pytest.fixture(scope="module")
def ours(
    two_ranks: Ranks, metrics_of: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[float]]:
    """The losses of a trial of ours, which those by hand are to repeat."""
    run_dir = tmp_path_factory.mktemp("ours")
    two_ranks.run(train, "ours", run_dir)
    return losses(metrics_of, run_dir)


def losses(metrics_of: Callable[..., Any], run_dir: Path) -> dict[str, list[float]]:
    return {
        "training": [metrics["loss"] for metrics in metrics_of(run_dir, "training")],
        "validation": [metrics["validation_loss"] for metrics in metrics_of(run_dir, "validation")],
    }


@pytest.mark.parametrize(("name", "stages"), [("replicated", 1), ("overwritten", 1), ("piped", 2)])
def test_a_trial_by_hand_trains_as_one_of_ours(
    two_ranks: Ranks,
    metrics_of: Callable[..., Any],
    ours: dict[str, list[float]],
    name: str,
    stages: int,
    tmp_path: Path,
) -> None:
    two_ranks.run(train, name, tmp_path, stages)
    found = losses(metrics_of, tmp_path)
    assert len(found["training"]) == STEPS
    assert found["training"] == pytest.approx(ours["training"], rel=1e-5)
    assert found["validation"] == pytest.approx(ours["validation"], rel=1e-5)
    assert found["training"][-1] < 0.9 * found["training"][0], "it learns"
    assert all(("bubble" in metrics) == (stages > 1) for metrics in metrics_of(tmp_path, "training"))


# --------------------------------------------------------------------------------- what is it that trains?


def measure(name: str, run_dir: Path, engine: str, zero_stage: int) -> str:
    """In a rank: measure a trial that is to be trained so; the engine of its row, or why there is none."""
    from determined_ds import ConfigError, measure_throughput, open_context

    hparams = hyperparameters()
    hparams["overwrite_deepspeed_args"]["zero_optimization"] = {"stage": zero_stage}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine=engine) as context:
        try:
            trial = trial_classes()[name](context)
            row = measure_throughput(trial, context, steps=1, warmup=0)
        except ConfigError as error:
            return str(error)
    return f"{row.engine} {row.name}"


def test_torchs_ddp_trains_what_is_measured_as_ddp(two_ranks: Ranks, tmp_path: Path) -> None:
    """A trial that makes its engine itself is refused: it would measure DeepSpeed under the name of ddp."""
    assert two_ranks.run(measure, "ours", tmp_path / "ours", "ddp", 0) == ["ddp ddp"] * 2
    for said in two_ranks.run(measure, "replicated", tmp_path / "replicated", "ddp", 0):
        assert "the trial wraps an engine of deepspeed, which would train instead" in said


def test_a_row_is_named_by_the_strategy_that_its_engine_has(two_ranks: Ranks, tmp_path: Path) -> None:
    """``Stubborn`` trains by a JSON of its own, whatever the experiment says."""
    assert two_ranks.run(measure, "replicated", tmp_path / "1", "deepspeed", 2) == ["deepspeed ZeRO 2"] * 2
    for said in two_ranks.run(measure, "stubborn", tmp_path / "2", "deepspeed", 2):
        assert "Stubborn makes an engine of ZeRO 0 in fp32; the configuration is ZeRO 2 in fp32" in said


# ------------------------------------------------------------------------------- under Determined's Trainer


def train_under_determined(run_dir: Path, ports: dict[str, int]) -> list[float]:
    """The loss that this rank saw in every micro-batch, and in the validation."""
    from determined.pytorch import Batch
    from determined.pytorch.deepspeed import Trainer

    from determined_ds import open_context
    from tests.benchmarks.parts import determined_context

    seen: list[float] = []
    with open_context(hparams=hyperparameters(), run_dir=run_dir, accelerator="cpu") as around:
        context = determined_context(around, hyperparameters(), **ports)

        class Watched(trial_classes()["ours"]):  # type: ignore[misc]
            def train_batch(self, *args: Any) -> Any:
                metrics = super().train_batch(*args)
                seen.append(float(metrics["loss"]))
                return metrics

        trial = Watched(context)
        Trainer(trial, context).fit(max_length=Batch(4), validation_period=Batch(4), checkpoint_policy="none")
    return seen


def test_a_trial_of_ours_runs_under_determineds_trainer(two_ranks: Ranks, tmp_path: Path) -> None:
    ports = {"pub_port": free_port(), "pull_port": free_port()}
    first, second = two_ranks.run(train_under_determined, tmp_path, ports)
    assert len(first) == len(second) == 4 * 2, "two micro-batches to a batch"
    assert first != second, "each rank has a share of its own"
