"""`--slots auto`: what an experiment asks for, or what this machine carries of it; `make run` asks so."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.config.accelerator import Accelerator
from determined_ds.errors import ConfigError
from determined_ds.launch import prepare
from determined_ds.launch.local_run import LocalRun
from determined_ds.launch.options import RunOptions
from determined_ds.launch.prepare import prepare_run
from tests.making import ROOT

GPT2 = ROOT / "experiments" / "gpt2"


def on_gpus(monkeypatch: pytest.MonkeyPatch, gpus: int) -> None:
    found = Accelerator(name="cuda", num_devices=gpus, bf16=True, fp16=True)
    monkeypatch.setattr(prepare, "detect_accelerator", lambda name: found)


def prepared(
    folder: Path, name: str = "const", slots: int | str | None = "auto", *overrides: str
) -> LocalRun:
    config = GPT2 / f"{name}.yaml"
    return prepare_run(
        RunOptions(config=config, context_dir=ROOT, slots=slots, overrides=overrides, run_dir=folder / "run")
    )


@pytest.mark.parametrize(("gpus", "taken"), [(1, 1), (2, 2), (8, 2)])
def test_no_more_than_there_is_and_no_more_than_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, gpus: int, taken: int
) -> None:
    on_gpus(monkeypatch, gpus)
    run = prepared(tmp_path)
    assert run.resolved.topology.slots == taken
    assert run.resolved.batch.global_batch_size == 32
    said = [warning for warning in run.warnings if warning.code == "fewer-slots"]
    assert len(said) == (taken < 2)
    if said:
        assert "this machine can run 1 on cuda; using 1" in str(said[0])


def test_a_number_that_does_not_divide_the_batch_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    on_gpus(monkeypatch, 3)
    assert prepared(tmp_path, "const", "auto", "resources.slots_per_trial=4").resolved.topology.slots == 2


@pytest.mark.parametrize(("name", "slots"), [("const", None), ("pipeline", "auto")])
def test_what_cannot_be_laid_out_is_refused_as_it_is(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, slots: str | None
) -> None:
    """As is a number that was not left open."""
    on_gpus(monkeypatch, 1)
    with pytest.raises(ConfigError, match="2 slots on a machine that carries 1 ranks"):
        prepared(tmp_path, name, slots)


def test_a_cpu_takes_what_is_asked_for(tmp_path: Path) -> None:
    run = prepared(tmp_path)
    assert run.resolved.topology.slots == 2
    assert run.warnings == ()


def test_make_run_takes_what_there_is() -> None:
    assert "det-ds run $(CONFIG) . --slots auto" in (ROOT / "Makefile").read_text()


def test_neither_a_number_nor_auto() -> None:
    result = CliRunner().invoke(main, ["run", str(GPT2 / "const.yaml"), str(ROOT), "--slots", "all"])
    assert result.exit_code == 2
    assert "--slots" in result.output
