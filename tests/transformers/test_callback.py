"""``DetCallback`` beside a Trainer: what it reports, when it stops, and what it refuses."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from determined import core

from determined_ds.errors import ConfigError, NotFiniteError, TrainingError
from determined_ds.transformers import DetCallback


class Reports:
    """A core context that remembers what it was given, with a storage; ``stored`` is a checkpoint that is there."""

    def __init__(self, stored: Path | None = None) -> None:
        self.distributed = core.DummyDistributedContext()
        asks = {"_preempt_mode": core.PreemptMode.WorkersAskChief, "should_preempt": lambda: self.stops}
        self.preempt, self.stops = SimpleNamespace(**asks), False
        self.train = self.checkpoint = self
        self.training: dict[int, dict[str, Any]] = {}
        self.validation: list[tuple[int, dict[str, Any]]] = []
        self.progress: list[float] = []
        self.report_progress = self.progress.append
        self.stored: dict[str, list[str]] = {}
        self.deleted: list[str] = []
        self.delete = self.deleted.append
        self._stored = stored

    def report_training_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        assert steps_completed not in self.training
        self.training[steps_completed] = metrics

    def report_validation_metrics(self, steps_completed: int, metrics: dict[str, Any]) -> None:
        self.validation.append((steps_completed, metrics))

    def upload(self, folder: str, *, metadata: dict[str, Any], shard: bool, selector: Any) -> str:
        uuid = f"uuid-{metadata['steps_completed']}"
        files = (str(file.relative_to(folder)) for file in Path(folder).rglob("*") if file.is_file())
        self.stored[uuid] = [name for name in files if selector(name)]
        return uuid

    def get_metadata(self, uuid: str) -> dict[str, Any]:
        return {"steps_completed": 2}

    def download(self, uuid: str, destination: str) -> None:
        assert self._stored is not None
        shutil.copytree(self._stored, Path(destination) / self._stored.name)


def arguments(folder: Path, **fields: Any) -> transformers.TrainingArguments:
    options = {"eval_strategy": "steps", "eval_steps": 2, "logging_steps": 2, "save_steps": 2, "max_steps": 4}
    return transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **{**options, **fields}
    )


TOKENS = [{"input_ids": each, "labels": each} for each in torch.arange(8).repeat(4, 1).T]


def train(reports: Reports, args: Any, *more: Any, eval_dataset: Any = None, **options: Any) -> Any:
    sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
    heads = dict.fromkeys(("num_hidden_layers", "num_attention_heads", "num_key_value_heads"), 1)
    trainer = transformers.Trainer(
        model=transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **heads)),
        args=args,
        train_dataset=TOKENS,
        eval_dataset=eval_dataset or TOKENS,
        callbacks=[DetCallback(reports, args, **options), *more],
    )
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    return trainer


def test_metrics_have_the_names_of_determined_s_callback(trial: Any, tmp_path: Path) -> None:
    trial(metric="eval_loss")
    reports = Reports()
    # An acknowledged stop at the last step would make a master start the finished trial again.
    reports.preempt.should_preempt = lambda: pytest.fail("asked") if len(reports.progress) == 4 else False
    trainer = train(reports, arguments(tmp_path))
    trainer.evaluate()  # as example scripts do: of a step that was reported
    assert sorted(reports.training) == [2, 4]
    assert reports.training[2].keys() >= {"loss", "grad_norm", "learning_rate", "batches", "epochs"}
    assert reports.training[2]["samples_per_second"] > 0
    assert not [name for name in reports.training[4] if name.endswith("_runtime")]
    assert [(step, set(metrics)) for step, metrics in reports.validation] == [
        (step, {"eval_loss", "batches", "epochs"}) for step in (2, 4)
    ]
    assert reports.progress == [0.25, 0.5, 0.75, 1.0]
    assert list(reports.stored) == ["uuid-2", "uuid-4"]
    assert all(name.startswith("checkpoint-4/") for name in reports.stored["uuid-4"])


def test_several_data_sets_are_one_validation_and_a_filter_keeps_the_searcher_s(
    trial: Any, tmp_path: Path
) -> None:
    trial(metric="eval_first_loss")
    reports, sets = Reports(), dict.fromkeys(("first", "second", "third"), TOKENS)
    train(reports, arguments(tmp_path, eval_steps=4), eval_dataset=sets, filter_metrics=["second_loss"])
    [(step, metrics)] = reports.validation
    assert step == 4
    assert metrics.keys() == {"batches", "epochs", "eval_second_loss", "eval_first_loss"}


class Stopping(transformers.TrainerCallback):
    def __init__(self, reports: Reports, step: int) -> None:
        self.reports, self.step = reports, step

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.reports.stops = state.global_step + 1 == self.step


@pytest.mark.parametrize(
    ("stop", "period", "validated"),
    [
        (3, {"save_steps": 2}, []),
        (4, {"save_strategy": "epoch"}, [4]),  # at the end of a pass: a resumed run begins with the next one
    ],
)
def test_a_stop_is_asked_at_every_step_and_evaluates_only_a_whole_pass(
    stop: int, period: dict[str, Any], validated: list[int], trial: Any, tmp_path: Path
) -> None:
    trial(metric="eval_loss")
    reports, how = Reports(), {"max_steps": 20, "per_device_train_batch_size": 2, **period}
    train(reports, arguments(tmp_path, eval_strategy="epoch", **how), Stopping(reports, stop))
    assert list(reports.stored)[-1] == f"uuid-{stop}"
    assert [step for step, _ in reports.validation] == validated
    assert max(reports.training) == stop


def test_a_loss_that_is_not_finite_is_not_saved_and_hyperparameters_that_nobody_reads_are_named(
    trial: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trial({"global_batch_size": 4}, metric="eval_loss")
    reports = Reports()
    callback = DetCallback(reports, arguments(tmp_path))
    assert "hyperparameters.global_batch_size: not read by transformers' own" in caplog.text
    with pytest.raises(NotFiniteError):
        callback.on_log(None, transformers.TrainerState(global_step=2), None, logs={"loss": math.nan})
    assert reports.training == {}


def test_a_metric_that_no_evaluation_has_ends_the_run_at_the_first(trial: Any, tmp_path: Path) -> None:
    trial(metric="eval_accuracy")
    with pytest.raises(ConfigError) as caught:
        train(Reports(), arguments(tmp_path))
    assert [problem.key for problem in caught.value.problems] == ["searcher.metric"]


def written(folder: Path, steps: int) -> Path:
    made = folder / f"checkpoint-{steps}"
    made.mkdir(parents=True)
    transformers.TrainerState(global_step=steps).save_to_json(str(made / "trainer_state.json"))
    return made


def test_resuming_takes_the_stored_checkpoint_and_removes_later_ones(trial: Any, tmp_path: Path) -> None:
    trial(latest="uuid-2", metric="eval_loss")
    written(tmp_path / "out", 4)  # never stored: its run was killed
    args = arguments(tmp_path / "out")
    callback = DetCallback(Reports(written(tmp_path / "stored", 2)), args)
    assert args.resume_from_checkpoint == str(tmp_path / "out" / "checkpoint-2")
    assert [each.name for each in (tmp_path / "out").iterdir()] == ["checkpoint-2"]
    with pytest.raises(TrainingError, match=r"write trainer\.train"):
        callback.on_train_begin(args, transformers.TrainerState(global_step=0), None)


def test_the_oldest_over_the_limit_are_deleted_but_never_the_best(trial: Any, tmp_path: Path) -> None:
    """The loss of this model falls: the newest is the best, so that only a limit of 1 can show who stays."""
    trial(metric="eval_loss")
    reports = Reports()
    args = arguments(
        tmp_path, max_steps=8, save_total_limit=2, learning_rate=0.0, load_best_model_at_end=True
    )
    train(reports, args, user_data={"who": "me"})
    assert list(reports.stored) == ["uuid-2", "uuid-4", "uuid-6", "uuid-8"]
    assert reports.deleted == ["uuid-4", "uuid-6"]  # at a rate of 0 the first one stays the best
    assert "checkpoint-8/my_data.json" in reports.stored["uuid-8"]
