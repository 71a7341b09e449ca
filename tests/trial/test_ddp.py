"""torch's DistributedDataParallel trains what ZeRO 0 trains: the same losses, rates and norms, without DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks

STEPS = 6
CLIPPING = 0.05
SAMPLES = torch.randn(48, 3, generator=torch.Generator().manual_seed(1))
DATA = [(sample, sample.sum(0, keepdim=True).sin() * 4) for sample in SAMPLES]
ADAMW = {"type": "AdamW", "params": {"lr": "auto", "weight_decay": 0.1}}
SGD = {"type": "SGD", "params": {"lr": "auto", "momentum": 0.9}}

Reports = Callable[[Path, str], list[dict[str, Any]]]


def network() -> torch.nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))


def trial_class() -> Any:
    from determined_ds import DataParallelTrial

    class Regression(DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            return network()

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return torch.nn.functional.mse_loss(model(batch[0]).float(), batch[1])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(DATA)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(DATA[:11])

    return Regression


def hyperparameters(accumulation: int = 1, **json: Any) -> dict[str, Any]:
    return {
        "global_batch_size": 8,
        "learning_rate": 0.02,
        "warmup_num_steps": 4,
        "deepspeed_config": {
            "gradient_clipping": CLIPPING,
            "optimizer": ADAMW,
            "scheduler": {"type": "WarmupLR", "params": {"warmup_type": "linear"}},
            **json,
        },
        "overwrite_deepspeed_args": {"gradient_accumulation_steps": accumulation},
    }


def train(run_dir: Path, engine: str, hparams: dict[str, Any]) -> str:
    """In a rank: train and validate under our loop; hands back what is wrong with it."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from determined_ds.errors import ConfigError

    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine=engine) as context:
        trial = trial_class()(context)
        try:
            Trainer(trial, context).fit(
                max_length=Batch(STEPS),
                reporting_period=Batch(1),
                validation_period=Batch(STEPS // 2),
                checkpoint_policy="none",
            )
        except ConfigError as error:
            return str(error)
    return ""


@pytest.fixture
def ranks_of(one_rank: Ranks, two_ranks: Ranks) -> Callable[[int], Ranks]:
    return lambda size: {1: one_rank, 2: two_ranks}[size]


@pytest.mark.parametrize(
    ("num_ranks", "accumulation", "optimizer"),
    [(2, 1, ADAMW), (2, 2, ADAMW), (2, 2, SGD), (1, 2, ADAMW)],
    ids=["two ranks", "accumulated", "SGD", "one rank"],
)
def test_the_same_training_as_zero_0(
    num_ranks: int,
    accumulation: int,
    optimizer: dict[str, Any],
    ranks_of: Callable[[int], Ranks],
    metrics_of: Reports,
    tmp_path: Path,
) -> None:
    hparams = hyperparameters(accumulation, optimizer=optimizer)
    said = {
        engine: ranks_of(num_ranks).run(train, tmp_path / engine, engine, hparams)
        for engine in ("deepspeed", "ddp")
    }
    assert said["deepspeed"] == said["ddp"] == [""] * num_ranks
    for group, names in (("training", ("loss", "lr", "grad_norm")), ("validation", ("validation_loss",))):
        found, wanted = (metrics_of(tmp_path / engine, group) for engine in ("ddp", "deepspeed"))
        for name in names:
            values = [metrics[name] for metrics in found]
            assert values == pytest.approx([metrics[name] for metrics in wanted], rel=1e-6), name
    reports = metrics_of(tmp_path / "ddp", "training")
    assert len(reports) == STEPS
    assert all(report["grad_norm"] > CLIPPING for report in reports), "clipping is to bite"
    assert reports[0]["lr"] < reports[-1]["lr"] == pytest.approx(0.02), "and the rate to rise"
    first, last = metrics_of(tmp_path / "ddp", "validation")
    assert last["validation_loss"] < first["validation_loss"], "it learns"


def prove_checkpoint(run_dir: Path, hparams: dict[str, Any]) -> None:
    """In a rank: a batch, a checkpoint, the weights spoilt, the checkpoint loaded, the same validation."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context

    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp") as context:
        trial = trial_class()(context)
        Trainer(trial, context).fit(max_length=Batch(1), test_mode=True)
        assert trial.engine.global_steps == 1
        before = trial.engine.get_lr()
        trial.engine.save_checkpoint(run_dir / "own", tag="model0")
        context.distributed.allgather(None)
        trial.engine.load_checkpoint(run_dir / "own", tag="model0")
        assert trial.engine.global_steps == 1
        assert trial.engine.get_lr() == before
        trial.engine.device = torch.device("meta")  # any other than the host's
        trial.engine.load_checkpoint(run_dir / "own", tag="model0")
        counts = [state["step"] for state in trial.engine.optimizer.state.values()]
        # On a device, reading each would wait for it, at every step.
        assert {count.device.type for count in counts} == {"cpu"}


def test_a_checkpoint_holds_all_of_it(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(prove_checkpoint, tmp_path, hyperparameters(2))


def gradients_of_two_micro_batches(run_dir: Path) -> list[list[float]]:
    """In a rank: after each of them, the gradient of the first layer's bias."""
    from determined_ds import open_context

    with open_context(
        hparams=hyperparameters(accumulation=2), run_dir=run_dir, accelerator="cpu", engine="ddp"
    ) as context:
        engine = trial_class()(context).engine
        rank = context.distributed.rank
        found = []
        for index in range(2):
            micro_batch = SAMPLES[4 * rank + 2 * index :][:2]
            engine.backward(engine(micro_batch).square().mean())
            found.append(engine.module[0].bias.grad.tolist())
            engine.step()
        assert engine.module[0].bias.grad is None, "nothing is left after a step"
        assert (engine.global_steps, engine.micro_steps) == (1, 2)
        return found


def test_ranks_agree_on_gradients_once_a_step(two_ranks: Ranks, tmp_path: Path) -> None:
    model = network()
    (model(SAMPLES[:8]).square().mean()).backward()
    (first_of_0, of_0), (first_of_1, of_1) = two_ranks.run(gradients_of_two_micro_batches, tmp_path)
    assert first_of_0 != pytest.approx(first_of_1)
    assert of_0 == of_1 == pytest.approx(model[0].bias.grad.tolist(), rel=1e-5)


def build(run_dir: Path, hparams: dict[str, Any], pipeline: bool = False) -> dict[str, Any] | str:
    """In a rank: what an engine of these hyperparameters is like, or why there is none."""
    from determined_ds import PipelineTrial, open_context
    from determined_ds.errors import ConfigError

    class Piped(trial_class(), PipelineTrial):  # type: ignore[misc]  # a class that a function makes
        def build_layers(self) -> list[Any]:
            return list(network())

    try:
        with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp") as context:
            engine = (Piped if pipeline else trial_class())(context).engine
            assert context.models == [engine]
            return {
                "optimizer": type(engine.optimizer).__name__,
                "params": {key: engine.optimizer.defaults[key] for key in ("lr", "weight_decay")},
                "schedule": type(engine.lr_scheduler).__name__,
                "weights": {str(parameter.dtype) for parameter in engine.parameters()},
                "outputs": str(engine(SAMPLES[:2]).dtype),
                "half": (engine.bfloat16_enabled(), engine.fp16_enabled()),
                "names": [name for name, _ in engine.named_parameters()],
            }
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize(
    ("stated", "name"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True, "fused": True}}, "AdamW"),
        ({"type": "adam"}, "AdamW"),  # as DeepSpeed takes it
        ({"type": "Adam", "params": {"adam_w_mode": False}}, "Adam"),
        ({"type": "Adagrad"}, "Adagrad"),
        ({"type": "RMSprop", "params": {"alpha": 0.9}}, "RMSprop"),
    ],
)
def test_the_optimizer_that_deepspeed_would_take(
    one_rank: Ranks, tmp_path: Path, stated: dict[str, Any], name: str
) -> None:
    (found,) = one_rank.run(build, tmp_path, hyperparameters(optimizer=stated))
    assert found["optimizer"] == name
    assert found["schedule"] == "WarmupLR"


def test_bf16_is_an_autocast_over_fp32_weights(one_rank: Ranks, tmp_path: Path) -> None:
    for section in ({"bf16": {"enabled": True}}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}):
        (found,) = one_rank.run(build, tmp_path, hyperparameters(**section))
        assert (found["weights"], found["outputs"]) == ({"torch.float32"}, "torch.bfloat16")
        assert found["half"] == (True, False)
        assert found["names"][0] == "module.0.weight", "as in DeepSpeed's engine"


@pytest.mark.parametrize(
    ("json", "said"),
    [
        ({"optimizer": {"type": "Lamb"}}, ["optimizer.type = 'Lamb'", "one of torch's optimizers", "AdamW"]),
        ({"optimizer": {"type": "SGD", "params": {"betas": [0.9, 0.9]}}}, ["optimizer.params", "betas"]),
        (
            {"optimizer": {"type": "AdamW", "params": {"torch_adam": False, "bias_correction": False}}},
            ["optimizer.params.bias_correction = false"],
        ),
        ({"optimizer": {}}, ["optimizer.type", "is missing", "build_optimizer"]),
        (
            {"torch_autocast": {"enabled": True, "dtype": "float16"}},
            ["fp16", "on CUDA only, not on cpu"],
        ),
    ],
)
def test_what_torch_alone_cannot_do(
    one_rank: Ranks, tmp_path: Path, json: dict[str, Any], said: list[str]
) -> None:
    (found,) = one_rank.run(build, tmp_path, hyperparameters(**json))
    assert isinstance(found, str)
    assert "fix: " in found
    for words in said:
        assert words in found


def test_a_pipeline_is_deepspeeds(two_ranks: Ranks, tmp_path: Path) -> None:
    cut = {**hyperparameters(), "pipe_parallel_size": 2}
    for hparams, pipeline in ((hyperparameters(), True), (cut, True), (cut, False)):
        for found in two_ranks.run(build, tmp_path, hparams, pipeline):
            assert "engine = 'ddp': torch's DistributedDataParallel holds the whole model" in str(found)
