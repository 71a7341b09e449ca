"""What ``core.init()`` gives a script: each part of Determined's core context answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import determined as det
import pytest
from determined import core

from determined_ds.config.accelerator import Accelerator
from determined_ds.documents.reading import parse_yaml
from determined_ds.errors import ConfigError
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.protocol.checkpoint_files import checkpoints_in, damage_of
from determined_ds.protocol.signals import STOP, TRAINED
from determined_ds.runtime.scripts.as_on_cluster import surrounded
from determined_ds.runtime.scripts.cluster_info import cluster_info
from determined_ds.runtime.scripts.core_init import core_init
from determined_ds.runtime.scripts.given_run import ScriptRun, begin

TEXT = """
entrypoint: python3 train.py
searcher: {name: single, metric: loss, max_length: {epochs: 7}}
hyperparameters: {width: 3}
data: {path: here}
"""
CPU = Accelerator(name="cpu", num_devices=1, bf16=False, fp16=False)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptRun]:
    found = ScriptRun(
        run_dir=tmp_path / "name" / "run", experiment=parse_experiment(parse_yaml(TEXT, "a.yaml"))
    )
    found.run_dir.mkdir(parents=True)
    found.there.new_trial()
    begin(found)
    with surrounded(found, CPU):
        yield found
    begin(None)
    STOP.clear()
    TRAINED.clear()


def test_the_information_is_the_runs_and_no_clusters(run: ScriptRun) -> None:
    info = det.get_cluster_info()
    assert info is not None
    assert cluster_info() is None
    assert (info.trial.hparams, info.user_data) == ({"width": 3}, {"path": "here"})
    assert info.trial.trial_seed == run.experiment.trial_seed
    assert info.trial._config["min_validation_period"] == {"batches": 0}
    assert info.container_addrs == ["127.0.0.1"]
    assert (info.container_rank, info.slot_ids, info.gpu_uuids) == (0, [0], [])


def test_every_part_answers(run: ScriptRun) -> None:
    assert core.init is core_init
    with det.core.init(preempt_mode=core.PreemptMode.ChiefOnly) as context:
        assert run.listens
        assert not TRAINED.is_set()
        context.train.set_status("busy")
        assert context.train.get_experiment_best_validation() is None
        context.train.report_metrics("validation", 2, {"loss": 3.0})
        context.train.report_validation_metrics(4, {"loss": 5.0})
        context.train.report_progress(0.5)
        assert TRAINED.is_set()
        assert context.train.get_experiment_best_validation() == 3.0
        assert context.train.set_metadata({"a": 1}) == context.train.get_metadata() == {"a": 1}
        assert context.train.get_tensorboard_path() == run.there.tensorboard
        operations = context.searcher.operations()
        with pytest.warns(FutureWarning, match="operations"):
            operation = next(operations)
        operation.report_progress(operation.length)
        operation.report_completed(3.0)
        assert (operation.length, next(operations, None)) == (7, None)
        assert context.searcher.get_configured_units() is core.Unit.EPOCHS
        context.profiler.on()
        context.profiler.off()
        assert context.info is det.get_cluster_info()
        with pytest.raises(ValueError, match="between 0 and 1"):
            context.train.report_progress(1.5)


@pytest.mark.parametrize("mode", list(core.PreemptMode))
def test_a_stop_is_heard_in_each_mode(run: ScriptRun, mode: core.PreemptMode) -> None:
    with core.init(preempt_mode=mode) as context:
        assert context.preempt.should_preempt() is False
        STOP.set()
        assert context.preempt.should_preempt() is True
        context.preempt.acknowledge_preemption_signal()


def test_a_checkpoint_is_whole_or_absent(run: ScriptRun, tmp_path: Path) -> None:
    with core.init() as context:
        with (
            pytest.raises(ArithmeticError),
            context.checkpoint.store_path({"steps_completed": 1}) as (path, _),
        ):
            raise ArithmeticError
        with context.checkpoint.store_path({"steps_completed": 2}) as (path, first):
            (path / "weights").write_text("two")
            assert checkpoints_in(run.there.checkpoints) == []
        (tmp_path / "src").mkdir()
        for name in ("weights", "other"):
            (tmp_path / "src" / name).write_text("three")
        three = {"steps_completed": 3, "mine": 1}
        second = context.checkpoint.upload(tmp_path / "src", three, selector=lambda name: name != "other")
        with pytest.raises(ConfigError, match="steps_completed"):
            context.checkpoint.upload(tmp_path / "src", {})
        kept = checkpoints_in(run.there.checkpoints)
        assert [(each.uuid, each.steps_completed) for each in kept] == [(second, 3), (first, 2)]
        assert [damage_of(each.path) for each in kept] == [None, None]
        assert context.checkpoint.get_metadata(second) == three
        context.checkpoint.download(second, tmp_path / "fetched")
        assert {file.name for file in (tmp_path / "fetched").iterdir()} >= {"weights", "metadata.json"}
        context.checkpoint.delete(first)
        assert len(checkpoints_in(run.there.checkpoints)) == 1
        (kept[0].path / "weights").write_text("four!")
        assert "weights" in str(damage_of(kept[0].path))


def test_a_fork_is_read_by_its_uuid(run: ScriptRun, tmp_path: Path) -> None:
    other = tmp_path / "other" / "checkpoints" / "abc"
    other.mkdir(parents=True)
    (other / "metadata.json").write_text('{"steps_completed": 5}')
    run.fork = other
    with core.init() as context, context.checkpoint.restore_path("abc") as path:
        assert path == other
        assert context.checkpoint.get_metadata("abc") == {"steps_completed": 5}


def test_several_ranks_have_to_be_named(run: ScriptRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="from_torch_distributed"):
        core.init()


def test_a_run_that_resumes_is_taken_over_by_its_first_report(run: ScriptRun) -> None:
    new: Any = run.there.make_next()
    new.metrics.write_text("")
    with core.init() as context:
        assert not run.there.is_replaced
        context.train.report_training_metrics(1, {"loss": 1.0})
    assert run.there.is_replaced
    assert len(run.there.metrics.read_text().splitlines()) == 1
