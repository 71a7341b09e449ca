"""``det-ds estimate``: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.protocol.machine_file import MachineFigures
from determined_ds.runtime.shapes.of_experiment import UNMEASURED
from tests.command import ROOT
from tests.tune.measured_machine import machine, written

GPT2 = str(ROOT / "experiments" / "gpt2" / "const.yaml")


def estimate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["estimate", *map(str, arguments)])


def refused(*arguments: str | Path) -> str:
    result = estimate(*arguments)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "fix: " in result.output
    return result.output


def as_json(*arguments: str | Path) -> dict[str, Any]:
    result = estimate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


SIX_BILLION = ("--params", "6B", "--layers", "28", "--hidden", "4096", "--heads", "16", "--slots", "8")


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    result = estimate(*SIX_BILLION, "--gpu-memory", "80GiB")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 100
    assert "\x1b" not in result.stdout
    assert "…" not in result.stdout
    rows = {line[:22].strip(): line[22:].split() for line in lines if line.startswith("ZeRO")}
    assert list(rows) == [
        *(f"ZeRO {stage}" for stage in (0, 1, 2, 3)),
        *(f"ZeRO {stage}, offload opt" for stage in (1, 2, 3)),
        "ZeRO 3, offload all",
    ]
    assert rows["ZeRO 1"][:3] == ["11.18", "11.18", "8.38"]
    assert rows["ZeRO 0"][-2:] == ["no", "-"]
    assert rows["ZeRO 1"][-2] == "yes"
    assert "cheapest that fits: ZeRO 1, " in result.stdout
    assert "for fragments" in result.stdout


def test_without_a_gpu_nothing_is_said_of_fitting() -> None:
    result = estimate("--params", "125M")
    assert result.exit_code == 0
    assert "fits" not in result.stdout.splitlines()[7]
    assert "assumed  8 ranks" in result.stdout
    assert "assumed  12 layers of width" in result.stdout


def test_json_is_in_bytes() -> None:
    found = as_json(*SIX_BILLION, "--gpu-memory", "80GiB", "--precision", "fp16", "--micro-batch", "2")
    zero2 = found["strategies"][2]
    assert (zero2["zero_stage"], zero2["precision"], zero2["micro_batch_size"]) == (2, "fp16", 2)
    assert zero2["parameters_bytes"] == 12 * 10**9
    assert zero2["fits"] is True
    assert zero2["largest_micro_batch"] >= 2
    assert found["cheapest"] == "ZeRO 1"
    assert found["gpu_memory_bytes"] == 80 * 2**30


def test_checkpointing_makes_room() -> None:
    plain, recomputed = (
        as_json(*SIX_BILLION, "--gpu-memory", "80GiB", *more)["strategies"][3]
        for more in ((), ("--activation-checkpointing",))
    )
    assert recomputed["activations_bytes"] < plain["activations_bytes"] / 3
    assert recomputed["largest_micro_batch"] > 2 * plain["largest_micro_batch"]


def test_an_experiments_own_strategy_is_marked() -> None:
    result = estimate(GPT2, str(ROOT), "--gpu-memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "model    842K parameters: 4 layers, 128 wide" in result.stdout
    assert "ZeRO 1 *" in result.stdout
    assert "in bf16, micro-batch 16" in result.stdout


def test_a_pipeline_has_rows_of_its_own() -> None:
    found = as_json(ROOT / "experiments" / "gpt2" / "pipeline.yaml", ROOT, "--slots", "4")
    assert [row["pipe_parallel_size"] for row in found["strategies"][:3]] == [2, 2, 1]
    assert {row["replicas"] for row in found["strategies"]} == {2, 4}


def test_layers_that_a_run_would_measure_are_said_to_be_counted_as_by_parameters() -> None:
    measured = ("--set", "hyperparameters.partition_method=measured")
    pipeline = ROOT / "experiments" / "gpt2" / "pipeline.yaml"
    own, by_parameters = (as_json(pipeline, ROOT, *more) for more in (measured, ()))
    assert own["model"].pop("assumptions") == [UNMEASURED]
    assert by_parameters["model"].pop("assumptions") == []
    assert own["model"]["stage_parameters"] == by_parameters["model"]["stage_parameters"]


def test_a_pipelines_schedules_are_drawn(tmp_path: Path) -> None:
    """Those that can order its micro-batches; the others are named."""
    picture, config = tmp_path / "schedules.png", ROOT / "experiments" / "gpt2" / "pipeline4.yaml"
    fewer = "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=4"
    drawn = estimate(config, ROOT, "--schedules", picture, "--set", fewer)
    assert drawn.exit_code == 0, drawn.output
    assert drawn.output.splitlines()[-2:] == [
        str(picture),
        "not drawn: dualpipev needs 2 micro-batches a rank: at least 8, not 4",
    ]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "--schedules: draws a pipeline, and CONFIG has none" in refused(GPT2, ROOT, "--schedules", picture)
    nowhere = tmp_path / "missing" / "schedules.png"
    assert "name a file in a folder that exists" in refused(config, ROOT, "--schedules", nowhere)


def test_a_pipeline_is_shown_under_every_schedule_that_it_can_have() -> None:
    pipeline = "experiments/gpt2/pipeline.yaml"
    found = as_json(pipeline)
    rows = {(row["schedule"], row["chunks"]): row for row in found["schedules"]}
    micro_batches = found["strategies"][0]["accumulation"]
    assert {("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("zb-h1", 1), ("dualpipev", 2)} <= rows.keys()
    assert [name for name, row in rows.items() if row["is_configured"]] == [("1f1b", 1)]
    assert rows["1f1b", 1]["bubble"] == pytest.approx(1 / (micro_batches + 1))
    assert rows["1f1b", 1]["most_held"] == [2, 1]
    assert rows["gpipe", 1]["most_held"] == [micro_batches] * 2
    most = {name: max(stage["total_bytes"] for stage in row["stages"]) for name, row in rows.items()}
    assert most["gpipe", 1] > most["interleaved", 2] > most["1f1b", 1]
    [own] = [row for row in found["strategies"] if row["name"] == "a pipeline of 2 with ZeRO 0"]
    assert own["total_bytes"] == most["1f1b", 1]
    shown = estimate(pipeline).stdout
    assert "1f1b *" in shown
    assert "schedules of 2 stages" in shown
    assert "schedules of" not in estimate("--params", "6B").stdout


def test_a_script_is_estimated_by_the_model_that_its_yaml_describes() -> None:
    found = as_json(ROOT / "experiments/hf_trainer/const.yaml", ROOT)
    assert found["model"]["num_layers"] == 4
    assert found["model"]["sequence_length"] == 128
    assert found["model"]["assumptions"] == [
        "the script trains the model of hyperparameters.model_config, and all of it"
    ]


def test_flags_go_before_the_experiment() -> None:
    found = as_json(
        GPT2, ROOT, "--precision", "fp32", "--micro-batch", "3", "--set", "hyperparameters.model_size=small"
    )
    assert {(row["precision"], row["micro_batch_size"]) for row in found["strategies"]} == {("fp32", 3)}
    assert found["model"]["num_layers"] == 12


def test_a_hugging_face_config(tmp_path: Path) -> None:
    import transformers

    transformers.GPT2Config().save_pretrained(tmp_path)
    found = as_json("--hf-config", tmp_path, "--gpu-memory", "16GiB", "--sequence-length", "512")
    assert found["model"]["num_parameters"] == 124_439_808
    assert found["model"]["sequence_length"] == 512
    assert found["cheapest"] == "ZeRO 0"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model is given"),
        (("--params", "6X"), "--params = '6X'"),
        (("--params", "-6B"), "above 0"),
        (("--params", "6B", "--layers", "-3", "--slots", "0"), "--slots = 0: must be 1 or more"),
        (("--params", "6B", "--hidden", "100", "--heads", "7"), "use --heads 5 or 10"),
        (("--layers", "3"), "--hidden"),
        (("--params", "6B", "--hf-config", "x"), "given 2 times: --hf-config, --params"),
        (("--params", "6B", "--set", "a=1"), "--set: changes a CONFIG"),
        (("--params", "6B", "--gpu-memory", "80QB"), "the unit QB must be one of"),
        (("--params", "6B", "--gpu-memory", "2GiB"), "use GPUs of 9."),
        (("nonesuch.yaml",), "nonesuch.yaml: no such file"),
        (("--hf-config", "nonesuch"), "no such file or folder"),
    ],
)
def test_what_is_wrong_is_refused_with_a_fix(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)


def test_hugging_face_configs_that_are_none(tmp_path: Path) -> None:
    assert "has no config.json" in refused("--hf-config", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "nonesuch"}')
    assert "`nonesuch`" in refused("--hf-config", tmp_path)
    (tmp_path / "config.json").write_text('{"model_type":')
    assert "not a valid JSON file" in refused("--hf-config", tmp_path)


def test_a_trial_that_cannot_be_built_is_to_be_given_by_its_sizes(own_model: Path) -> None:
    (own_model / "trial.py").write_text(
        "from determined_ds import DeepSpeedTrial\nclass TinyTrial(DeepSpeedTrial): ...\n"
    )
    said = refused(own_model / "experiment.yaml", own_model)
    assert "subclasses DeepSpeedTrial directly" in said
    assert "--params 345M" in said


def test_a_model_without_a_sequence_is_estimated(own_model: Path) -> None:
    found = as_json(own_model / "experiment.yaml", own_model, "--gpu-memory", "8GiB")
    assert found["model"]["num_parameters"] == 5
    assert found["cheapest"] == "ZeRO 0"


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_every_terminal_and_a_pipe_show_it_whole(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    result = estimate(*SIX_BILLION, "--gpu-memory", "80GiB")
    assert max(map(len, result.stdout.splitlines())) <= columns
    assert "ZeRO 3, offload all" in result.stdout
    assert "micro" in result.stdout
    assert ("no room here for" in result.stdout) == (columns < 80)


@pytest.mark.parametrize("name", ["const", "pipeline"])
def test_a_trial_that_computes_its_blocks_again_keeps_less(name: str) -> None:
    config, key = ROOT / "experiments" / "gpt2" / f"{name}.yaml", "hyperparameters.activation_checkpointing"
    asked = (config, ROOT, "--set", f"{key}=true")

    def activations(*arguments: str | Path) -> list[int]:
        return [strategy["activations_bytes"] for strategy in as_json(*arguments)["strategies"]]

    kept, again, flagged = activations(config, ROOT), activations(*asked), activations(*asked, FLAG)
    assert all(less < 0.7 * more for less, more in zip(again, kept, strict=True))
    assert flagged == again  # said twice, done once


FLAG = "--activation-checkpointing"


# ------------------------------------------------------------------------------------------- seconds


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> MachineFigures:
    """This machine has four cores, and figures."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setattr("determined_ds.devices.num_cores", lambda: 4)
    figures = machine()
    monkeypatch.setenv("DETERMINED_DS_MACHINE", str(written(tmp_path / "machine.json", figures)))
    return figures


SMALL = ("--params", "1M", "--layers", "4", "--hidden", "128", "--precision", "fp32", "--slots", "2")


def test_seconds_are_those_of_the_measured_machine(measured: MachineFigures) -> None:
    result = estimate(*SMALL)
    assert result.exit_code == 0, result.output
    assert "times: of this machine, by det-ds bench of 2026-11-23" in result.stdout
    head, *rows = result.stdout.partition("\nseconds ")[2].splitlines()
    assert head.split() == ["step", "compute", "communic.", "optimizer", "checkpoint"]
    found = as_json(*SMALL)["expected_times"]["strategies"]
    assert rows[0].split()[:2] == ["ZeRO", "0"]
    assert float(rows[0].split()[3]) == pytest.approx(found[0]["compute_s"], rel=0.01)
    zero0, zero1 = found[:2]
    assert zero0["step_s"] == pytest.approx(
        zero0["compute_s"] + zero0["communication_s"] + zero0["optimizer_s"]
    )
    assert zero0["communication_s"] == pytest.approx(1e-3 + 4e6 / 1e9, rel=1e-2)
    assert zero1["checkpoint_s"] > 0


def test_what_was_not_measured_has_no_seconds(measured: MachineFigures, tmp_path: Path) -> None:
    written(Path(os.environ["DETERMINED_DS_MACHINE"]), replace(measured, steps=(), peaks=(), checkpoints=()))
    found = as_json(*SMALL)["expected_times"]
    assert [found["strategies"][0][key] for key in ("step_s", "compute_s", "checkpoint_s")] == [None] * 3
    assert found["strategies"][0]["communication_s"] > 0
    assert "compute: not measured; det-ds bench training measures it" in found["notes"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--slots", "8"), "not for 8 ranks: this machine has 4 CPU cores"),
        (("--slots", "2", "--precision", "bf16"), "training in bf16 was not timed"),
    ],
)
def test_what_the_figures_are_not_of_is_named(
    words: tuple[str, ...], says: str, measured: MachineFigures
) -> None:
    assert says in " ".join(estimate(*SMALL, *words).stdout.split())


def test_a_machine_without_figures_is_told_how_to_get_them() -> None:
    assert "times: none of this machine: det-ds bench measures" in estimate(*SMALL).stdout
    assert as_json(*SMALL)["expected_times"]["strategies"] == []


def test_figures_of_another_machine_are_ignored(measured: MachineFigures) -> None:
    other = replace(measured, hardware=replace(measured.hardware, device="Z80"))
    written(Path(os.environ["DETERMINED_DS_MACHINE"]), other)
    assert "is of Z80" in " ".join(estimate(*SMALL).stdout.split())
