"""A script that runs by itself, in two ranks: its run directory, metrics, stop, resume, several engines, adoption."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from determined_ds import load_model_from_checkpoint_path, load_state_dict_from_checkpoint_path
from determined_ds.errors import CheckpointError
from tests.harness.command import ROOT
from tests.harness.ranks import Ranks
from tests.package import checkpoints, records

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}}
DS = {"zero_optimization": {"stage": 1}, "gradient_accumulation_steps": 2, "optimizer": ADAM}
HPARAMS = {"global_batch_size": 8, "deepspeed_config": DS}
SAMPLES, STEPS_A_PASS = 24, 3


def linear(ds_config: dict[str, Any], size: int = 4) -> Any:
    import deepspeed
    import torch

    torch.manual_seed(3)
    model = torch.nn.Linear(size, 2)
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)[0]


def data(size: int = SAMPLES) -> Any:
    import torch

    inputs = torch.arange(4.0 * size).reshape(size, 4) / size
    return torch.utils.data.TensorDataset(inputs, inputs[:, :2])


def step(engine: Any, batch: Any) -> None:
    import torch

    engine.backward(torch.nn.functional.mse_loss(engine(batch[0]), batch[1]))
    engine.step()


def result_of(run_dir: Path) -> dict[str, Any]:
    return json.loads((run_dir / "result.json").read_text())  # type: ignore[no-any-return]


def reporting(run_dir: str) -> list[Any]:
    """In a rank: what is reported, and from which ranks, as a script may do it."""
    import determined_ds

    hparams = {**HPARAMS, "fit": {"reporting_period": {"batches": 2}}}
    with determined_ds.session(hparams, run_dir=run_dir, accelerator="cpu") as s:
        engine, loader = linear(s.ds_config), s.loader(data())
        held = s.validation_loader(data(7))
        s.checkpoint(engine)
        s.report({"start": 5.0}, validation=True)
        count = 0
        for epoch in s.epochs(2):
            for batch in loader:
                step(engine, batch)
                count += 1
                s.report({"mine": float(10 * s.rank + count)})
            if epoch == 0:  # on one rank, after a pass
                if s.rank == 0:
                    s.report({"chief": 1.5}, validation=True)
                    s.checkpoint()
                continue
            for inputs, _ in held:  # batch by batch
                s.report({"mean": inputs[:, 0].mean()}, validation=True)
        return [len(loader), len(held), s.batches_trained, engine.global_steps, str(s.device)]


def test_metrics_are_means_over_ranks_micro_batches_and_samples(two_ranks: Ranks, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    found = two_ranks.run(reporting, str(run_dir))
    assert found == [[2 * STEPS_A_PASS, 2, 5, 6, "cpu"]] * 2  # the last step ends with the session
    training = [metrics["mine"] for _, metrics in records(run_dir, "training")]
    assert training == [7.5, 11.5, 15.5]  # of two ranks and four micro-batches each: 5 + (1 + ... + 4) / 4
    validation = dict(records(run_dir, "validation"))
    assert (validation[0]["start"], validation[3]["chief"]) == (5.0, 1.5)
    inputs = [float(row[0]) for row, _ in data(7)]
    assert validation[6]["mean"] == pytest.approx(sum(inputs) / 7)
    result = result_of(run_dir)
    assert (result["status"], result["steps_completed"]) == ("completed", 6)
    newest, earlier = checkpoints(run_dir)
    assert json.loads((earlier / "metadata.json").read_text())["steps_completed"] == STEPS_A_PASS
    assert set(load_state_dict_from_checkpoint_path(newest)) == {"weight", "bias"}
    with pytest.raises(CheckpointError, match="written by a script"):
        load_model_from_checkpoint_path(newest)


class Counter:
    count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def several(run_dir: str, stop_at: int, resume: bool) -> Any:
    """In a rank: two engines, a counter, and a rate that is halved after each pass; a stop is requested in a pass."""
    import torch

    import determined_ds

    hparams = {**HPARAMS, "fit": {"checkpoint_period": {"batches": 1}}}  # after each the ranks ask for a stop
    with determined_ds.session(hparams, run_dir=run_dir, resume=resume, accelerator="cpu") as s:
        first, second = linear(s.ds_config), linear({**s.ds_config, "optimizer": ADAM}, 2)
        loader, counter = s.loader(data()), Counter()
        s.checkpoint(first, second, counter=counter)
        at_start = (s.batches_trained, counter.count)
        for _ in range(3):
            counter.count += 100  # before a pass: belongs to the step before it
            for inputs, targets in loader:
                middle = first(inputs)
                loss = torch.nn.functional.mse_loss(second(middle), targets)
                first.backward(loss, retain_graph=True)
                second.backward(torch.nn.functional.mse_loss(second(middle.detach()), targets))
                first.step()
                second.step()
                counter.count += 1
                s.report({"loss": loss})
                if first.global_steps == stop_at and s.rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
            if s.stop_requested:
                break
            for group in first.optimizer.param_groups:
                group["lr"] /= 2
        weights = [p.detach().tolist() for engine in (first, second) for p in engine.module.parameters()]
        return at_start, counter.count, first.get_lr(), weights


def test_a_run_that_was_stopped_ends_as_if_it_had_not_been(two_ranks: Ranks, tmp_path: Path) -> None:
    """Engines and objects are restored; what the script does to them again, in passes that are done, is undone."""
    whole = two_ranks.run(several, str(tmp_path / "whole"), -1, False)
    assert whole[0][2] == [0.01 / 8]
    stopped = two_ranks.run(several, str(tmp_path / "run"), 2 * STEPS_A_PASS + 1, False)
    assert [count for _, count, *_ in stopped] == [314, 314]
    result = result_of(tmp_path / "run")
    assert (result["status"], result["steps_completed"]) == ("stopped", 7)
    assert result["resume"].startswith("DETERMINED_DS_RESUME=")
    resumed = two_ranks.run(several, str(tmp_path / "run"), -1, True)
    assert [start for start, *_ in resumed] == [(7, 314)] * 2
    assert [each[1:] for each in resumed] == [each[1:] for each in whole]


def failing(run_dir: str) -> Any:
    """In a rank: a script that states nothing but its own DeepSpeed configuration, and has a mistake of its own."""
    import determined_ds

    found: list[Any] = []
    try:
        with determined_ds.session(run_dir=run_dir, accelerator="cpu") as s:
            engine = linear({"train_batch_size": 12, "gradient_accumulation_steps": 3, "optimizer": ADAM})
            loader = s.loader(data())
            s.checkpoint(engine)
            found = [s.ds_config["train_micro_batch_size_per_gpu"], len(loader)]
            for number, batch in enumerate(loader):
                step(engine, batch)
                if number == 2:
                    s.checkpoint()
                    break
            for number, batch in enumerate(loader):  # which continues the pass
                step(engine, batch)
                if number == 2:
                    raise KeyError("mine")
    except KeyError as error:
        found.append(repr(error))
    return found


def test_the_engine_says_the_batch_and_a_failure_leaves_the_last_checkpoint(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    assert two_ranks.run(failing, str(tmp_path / "run")) == [[2, 6, "KeyError('mine')"]] * 2
    result = result_of(tmp_path / "run")
    assert (result["status"], result["cause"]) == ("failed", "crash")
    assert "mine" in result["reason"]
    assert result["checkpoint"]["steps_completed"] == 1  # the second step had not ended
    assert not list((tmp_path / "run" / "checkpoints").glob(".*"))
    assert "a pass over the loader was left before its end" in two_ranks.said(0)


def test_a_mistake_is_shown_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        'import determined_ds\nwith determined_ds.session({"global_batch_sise": 8}) as s:\n    pass\n'
    )
    how: dict[str, Any] = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, timeout=300, **how)
    assert done.returncode == 2
    assert "global_batch_sise" in done.stderr
    assert "Traceback" not in done.stderr
