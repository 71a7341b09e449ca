"""A trial written by hand as in Determined's first examples runs as it is; ours run under its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, free_port
from tests.package import records
from tests.trial.regression import Regression, error_of, layers, train, trial_class

STEPS = 8


def hyperparameters(stages: int = 1) -> dict[str, Any]:
    ds_config = {
        **dict.fromkeys(("train_batch_size", "train_micro_batch_size_per_gpu"), "auto"),
        "gradient_accumulation_steps": 2,
        "optimizer": {"type": "Adam", "params": {"lr": 0.05, "torch_adam": True}},
        "zero_optimization": {"stage": 0 if stages > 1 else 1},
    }
    return {"global_batch_size": 8, "pipe_parallel_size": stages, "deepspeed_config": ds_config}


def by_hand() -> Any:
    """The trial, made where deepspeed is loaded: in a rank."""
    import deepspeed
    from attrdict import AttrDict
    from deepspeed.pipe import PipelineModule
    from determined.pytorch import DataLoader
    from determined.pytorch.deepspeed import DeepSpeedTrial

    from determined_ds import DeepSpeedMPU

    class ByHand(DeepSpeedTrial):
        def __init__(self, context: Any) -> None:
            self.context = context
            self.args = AttrDict(context.get_hparams())
            self.is_piped = self.args.pipe_parallel_size > 1
            model: Any = torch.nn.Sequential(*layers())
            if self.is_piped:
                loss_fn = lambda outputs, targets: error_of(outputs - targets)  # noqa: E731
                model = PipelineModule(layers=layers(), num_stages=2, loss_fn=loss_fn)
            given = {"model": model, "model_parameters": list(model.parameters())}
            engine, *_ = deepspeed.initialize(args=self.args, **given)
            self.mpu = self.context.wrap_mpu(DeepSpeedMPU(engine.mpu))
            self.engine = self.context.wrap_model_engine(engine)

        def build_training_data_loader(self) -> Any:
            return DataLoader(Regression(), batch_size=self.args.train_micro_batch_size_per_gpu, shuffle=True)

        def build_validation_data_loader(self) -> Any:  # it divides neither by ranks nor by the micro-batch
            return DataLoader(Regression(11), batch_size=self.args.train_micro_batch_size_per_gpu)

        def error(self, batches: Any) -> torch.Tensor:
            inputs, targets = self.context.to_device(next(batches))
            return error_of(self.engine(inputs) - targets)

        def train_batch(self, iter_dataloader: Any, epoch_idx: int, batch_idx: int) -> Any:
            if self.is_piped:
                return {"loss": self.engine.train_batch(iter_dataloader)}
            loss = self.error(iter_dataloader)
            self.engine.backward(loss)
            self.engine.step()
            return {"loss": loss}

        def evaluate_batch(self, iter_dataloader: Any) -> Any:  # type: ignore[override]
            piped = self.engine.eval_batch if self.is_piped else self.error
            return {"validation_loss": piped(iter_dataloader)}

    return ByHand


def run(is_ours: bool, run_dir: Path, stages: int = 1) -> None:
    """Train in this rank."""
    ours = {"build_validation_data_loader": lambda self: self.validation_loader(Regression(11))}
    kind = trial_class(**ours) if is_ours else by_hand()
    train(run_dir, kind, hyperparameters(stages), steps=STEPS, checkpoint_policy="none")


def test_a_trial_by_hand_trains_as_one_of_ours(two_ranks: Ranks, tmp_path: Path) -> None:
    losses = {}
    for name, stages in (("ours", 1), ("replicated", 1), ("piped", 2)):
        two_ranks.run(run, name == "ours", tmp_path / name, stages)
        training = [metrics for _, metrics in records(tmp_path / name, "training")]
        assert all(("bubble" in metrics) == (stages > 1) for metrics in training)
        [validation] = [metrics["validation_loss"] for _, metrics in records(tmp_path / name, "validation")]
        losses[name] = [*(metrics["loss"] for metrics in training), validation]
        assert len(training) == STEPS
        assert losses[name] == pytest.approx(losses["ours"], rel=1e-5)
    assert sum(losses["ours"][4:STEPS]) < 0.9 * sum(losses["ours"][:4]), "it learns in the second pass"


def train_under_determined(run_dir: Path, ports: dict[str, int]) -> list[float]:
    """The loss that this rank saw in every micro-batch, and in the validation."""
    from determined.pytorch import Batch
    from determined.pytorch.deepspeed import Trainer

    from determined_ds import open_context
    from tests.harness.determineds_own import determined_context

    seen: list[float] = []
    with open_context(hparams=hyperparameters(), run_dir=run_dir, accelerator="cpu") as around:
        context = determined_context(around, hyperparameters(), **ports)

        class Watched(trial_class()):  # type: ignore[misc]
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
