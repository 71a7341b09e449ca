"""``build_scheduler``: torch's schedules drive every kind of engine, a step each, and resume; the JSON's beside it is
refused."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from determined_ds.errors import ConfigError, TrialError
from determined_ds.trial.schedules import PlateauSchedule, check_rates, give_schedule
from tests.making import decide
from tests.ranks import Ranks

STEPS = 8
KINDS = ("zero0", "zero1", "zero2", "zero3", "offload", "pipeline", "ddp", "several")


class Stranger:
    """As much of a trial as is asked."""

    def __init__(self, build: Any, *, metric: str = "validation_loss", smaller: bool = True) -> None:
        self.build_scheduler = build
        searcher = {"name": "single", "metric": metric, "smaller_is_better": smaller}
        ranks = SimpleNamespace(rank=0)
        self.context = SimpleNamespace(
            get_experiment_config=lambda: {"searcher": searcher}, distributed=ranks
        )


def optimizer(rates: tuple[float, ...] = (0.1,)) -> torch.optim.Optimizer:
    groups = [{"params": [torch.nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates]
    return torch.optim.AdamW(groups, lr=0.1)


def given(build: Any, ds_config: dict[str, Any] | None = None, **searcher: Any) -> Any:
    engine = SimpleNamespace(optimizer=optimizer(), lr_scheduler=None)
    give_schedule(Stranger(build, **searcher), engine, ds_config or {})
    return engine.lr_scheduler


def test_a_schedule_is_the_engines() -> None:
    assert isinstance(given(lambda made: lr_scheduler.StepLR(made, 2)), lr_scheduler.StepLR)
    assert given(lambda made: None) is None


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda made: lr_scheduler.StepLR, "call it: return StepLR(optimizer, ...)"),
        (lambda made: 0.1, "returned the float 0.1; expected a schedule"),
        (
            lambda made: lr_scheduler.StepLR(optimizer(), 2),
            "of another optimizer, so it would change nothing",
        ),
    ],
)
def test_what_is_not_a_schedule_of_the_optimizer_is_refused(build: Any, said: str) -> None:
    with pytest.raises(TrialError) as caught:
        given(build)
    assert said in str(caught.value)


def test_a_schedule_in_the_json_beside_it_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        given(lambda made: lr_scheduler.StepLR(made, 2), {"scheduler": {"type": "WarmupLR"}})
    assert caught.value.problems[0].code == "two-schedulers"


def test_null_removes_the_json_s_schedule_and_optimizer() -> None:
    written = {"scheduler": {"type": "WarmupLR"}, "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    over = {"scheduler": None, "optimizer": None}
    hparams = {"global_batch_size": 8, "overwrite_deepspeed_args": over}
    assert not {"scheduler", "optimizer"} & decide(hparams, written).ds_config.keys()
    assert not {"scheduler", "optimizer"} & decide(hparams, {}).ds_config.keys()


def test_a_plateau_is_driven_by_validations_and_resumes_with_its_new_settings() -> None:
    schedule = given(lambda made: lr_scheduler.ReduceLROnPlateau(made, factor=0.5, patience=0))
    assert isinstance(schedule, PlateauSchedule)
    for value in (1.0, 2.0):
        schedule.step()  # an engine's step changes nothing
        schedule.validated(value)
    assert schedule.get_last_lr() == [0.05]
    again = PlateauSchedule(lr_scheduler.ReduceLROnPlateau(optimizer(), factor=0.1, patience=3))
    again.load_state_dict(schedule.state_dict())
    assert (again.plateau.best, again.plateau.patience, again.plateau.factor) == (1.0, 3, 0.1)


@pytest.mark.parametrize(("metric", "smaller"), [("", True), ("accuracy", False)])
def test_a_plateau_without_its_metric_or_in_the_other_direction_is_refused(
    metric: str, smaller: bool
) -> None:
    with pytest.raises(ConfigError) as caught:
        given(lambda made: lr_scheduler.ReduceLROnPlateau(made), metric=metric, smaller=smaller)
    assert caught.value.problems[0].code == "plateau"


def test_a_warm_up_that_would_give_all_groups_one_rate_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """DeepSpeed's WarmupLR sets the rate of every group to one number, whatever the optimizer was built with."""
    trial = Stranger(None)
    ds_config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    check_rates(trial, optimizer((0.1, 0.1)), None, ds_config)
    assert not caplog.records
    check_rates(trial, optimizer((0.2, 0.2)), None, ds_config)
    assert "0.2 of Stranger.build_optimizer is not used" in caplog.text
    for own, groups in ((optimizer((0.1, 0.2)), None), (None, [{"params": [], "lr": 0.2}, {"params": []}])):
        with pytest.raises(ConfigError) as caught:
            check_rates(trial, own, groups, ds_config)
        assert caught.value.problems[0].code == "group-rates"
        listed = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": [0.1, 0.2]}}}
        check_rates(trial, own, groups, listed)


# ------------------------------------------------------------------------------------------- in ranks


def train(run_dir: Path, kind: str, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train in this rank. Returns the rates of each step, and the newest checkpoint."""
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial, Trainer, open_context

    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    rates: list[float] = []

    class Scheduled:
        def build_scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)

        def train_batch(self, *given: Any) -> Any:
            if self.engine.is_gradient_accumulation_boundary() or kind in ("pipeline", "several"):
                rates.append(self.engine.get_lr()[0])
            return super().train_batch(*given)

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    class Whole(Scheduled, DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Linear(4, 2)

        def loss(self, model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

    class Staged(Scheduled, PipelineTrial):
        def build_layers(self) -> Any:
            return [torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)]

        def loss(self, outputs: Any, targets: Any) -> Any:
            return torch.nn.functional.mse_loss(outputs, targets)

    class Pair(SeveralEnginesTrial):
        def build_models(self) -> Any:
            return {"first": torch.nn.Linear(4, 2), "second": torch.nn.Linear(4, 2)}

        def train_batch(self, batches: Any, epoch_idx: int, batch_idx: int) -> Any:
            for inputs, targets in [next(batches) for _ in range(self.resolved.batch.accumulation)]:
                for engine in self.engines.values():
                    engine.backward(torch.nn.functional.mse_loss(engine(inputs), targets))
                    engine.step()
            return {"loss": torch.zeros(())}

        def evaluate_batch(self, batches: Any, batch_idx: int) -> Any:
            next(batches)
            return {"validation_loss": torch.zeros(())}

    class Several(Scheduled, Pair):
        def build_scheduler(self, optimizer: Any) -> Any:
            assert self.building in ("first", "second")
            return super().build_scheduler(optimizer)

    zero: dict[str, Any] = {"stage": int(kind[-1]) if kind.startswith("zero") else 0}
    if kind == "offload":
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    params = {"lr": 0.1} if kind == "offload" else {"lr": 0.1, "torch_adam": True}
    ds_config = {
        "gradient_accumulation_steps": 1 if kind == "several" else 2,
        "zero_optimization": zero,
        "optimizer": {"type": "AdamW", "params": params},
    }
    hparams = {
        "global_batch_size": 8,
        "pipe_parallel_size": 2 if kind == "pipeline" else 1,
        "deepspeed_config": ds_config,
    }
    with open_context(
        hparams=hparams, run_dir=run_dir, accelerator="cpu", engine="ddp" if kind == "ddp" else "deepspeed"
    ) as context:
        trial: Any = {"pipeline": Staged, "several": Several}.get(kind, Whole)(context)  # type: ignore[arg-type]
        Trainer(trial, context).fit(max_length=Batch(steps), latest_checkpoint=resume)
        assert all(engine.lr_scheduler.last_epoch == steps for engine in context.models)
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return {"rates": rates, "uuid": newest.name}


def torchs_rates() -> list[float]:
    own, rates = optimizer(), []
    schedule = lr_scheduler.OneCycleLR(own, max_lr=0.1, total_steps=STEPS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # no step of the optimizer
        for _ in range(STEPS):
            rates.append(own.param_groups[0]["lr"])
            schedule.step()
    return rates


SHORT = ("zero1", "pipeline")


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in SHORT else pytest.param(kind, marks=pytest.mark.long("zero1 and pipeline are short"))
        for kind in KINDS
    ],
)
def test_each_step_has_torchs_rate_and_a_resumed_run_goes_on(
    kind: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    """As torch's schedule in a loop of its own: a step each, with accumulation, stopped and resumed."""
    first = two_ranks.run(train, tmp_path, kind, 3)[0]
    then = two_ranks.run(train, tmp_path, kind, STEPS, first["uuid"])[0]
    assert first["rates"] + then["rates"] == pytest.approx(torchs_rates())


def train_to_a_plateau(run_dir: Path, steps: int, resume: str | None = None) -> dict[str, Any]:
    """Train in this rank, with a validation after each step that is never better than the first."""
    from determined.pytorch import Batch

    from determined_ds import DataParallelTrial, Trainer, open_context

    data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randn(32, 2))
    rates: list[float] = []

    class Mine(DataParallelTrial):
        def build_model(self) -> Any:
            return torch.nn.Linear(4, 2)

        def build_scheduler(self, optimizer: Any) -> Any:
            return lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)

        def loss(self, model: Any, batch: Any) -> Any:
            return torch.nn.functional.mse_loss(model(batch[0]), batch[1])

        def evaluate(self, model: Any, batch: Any) -> Any:
            return {"validation_loss": 1.0}

        def on_step_end(self, batch_idx: int, metrics: Any) -> None:
            rates.append(self.engine.get_lr()[0])

        def build_training_data_loader(self) -> Any:
            return self.training_loader(data)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(data)

    ds_config = {"zero_optimization": {"stage": 1}, "optimizer": {"type": "AdamW", "params": {"lr": 0.1}}}
    with open_context(
        hparams={"global_batch_size": 8, "deepspeed_config": ds_config},
        exp_conf={"searcher": {"name": "single", "metric": "validation_loss"}},
        run_dir=run_dir,
        accelerator="cpu",
    ) as context:
        Trainer(Mine(context), context).fit(
            max_length=Batch(steps), validation_period=Batch(1), latest_checkpoint=resume
        )
    newest = max((run_dir / "checkpoints").iterdir(), key=lambda path: path.stat().st_mtime)
    return {"rates": rates, "uuid": newest.name}


def test_a_plateau_halves_the_rate_also_after_a_resume(one_rank: Ranks, tmp_path: Path) -> None:
    """The first validation is the best; every second one after it halves the rate of the next step."""
    first = one_rank.run(train_to_a_plateau, tmp_path, 3)[0]
    then = one_rank.run(train_to_a_plateau, tmp_path, 7, first["uuid"])[0]
    assert first["rates"] + then["rates"] == [0.1, 0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
