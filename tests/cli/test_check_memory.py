"""``det-ds check --memory``: its table, its JSON, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from tests.harness.command import ROOT

GPT2 = str(ROOT / "experiments" / "gpt2" / "const.yaml")


def estimate(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["check", *map(str, arguments), "--memory"])


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


SIX_BILLION = ("--parameters", "6B", "--slots", "8")


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
    assert (rows["ZeRO 0"][-3], rows["ZeRO 0"][-1]) == ("no", "-")
    assert (rows["ZeRO 1"][-3], float(rows["ZeRO 1"][-2])) == ("yes", pytest.approx(75.05 - 36.15, abs=0.02))
    assert "cheapest that fits: ZeRO 1, " in result.stdout
    assert "for fragments" in result.stdout


def test_the_answer_that_nothing_fits_is_an_answer_and_a_check_of_it_an_error() -> None:
    """A program can tell it from a failure; ``check --gpu-memory`` alone is the test."""
    assert as_json(*SIX_BILLION, "--gpu-memory", "2GiB")["cheapest"] is None
    said = estimate(*SIX_BILLION, "--gpu-memory", "2GiB")
    assert said.exit_code == 0
    assert "fix: use GPUs of 9." in said.stdout
    large = (GPT2, str(ROOT), "--set", "hyperparameters.model_size=xl", "--gpu-memory", "4GiB")
    assert estimate(*large).exit_code == 0
    checked = CliRunner().invoke(main, ["check", *large])
    assert checked.exit_code == 2
    assert "a rank needs" in checked.stdout


def test_an_experiments_own_strategy_is_marked() -> None:
    result = estimate(GPT2, str(ROOT), "--gpu-memory", "24GiB")
    assert result.exit_code == 0, result.output
    assert "model    842K parameters: 4 layers, 128 wide" in result.stdout
    assert "ZeRO 1 *" in result.stdout
    assert "in bf16, micro-batch 16" in result.stdout


def test_a_pipelines_schedules_are_drawn(tmp_path: Path) -> None:
    """Those that can order its micro-batches; the others are named."""
    picture, config = tmp_path / "schedules.png", ROOT / "experiments" / "gpt2" / "pipeline4.yaml"
    fewer = "hyperparameters.overwrite_deepspeed_args.gradient_accumulation_steps=4"
    drawn = estimate(config, ROOT, "--schedules", picture, "--set", fewer)
    assert drawn.exit_code == 0, drawn.output
    assert drawn.stdout.splitlines()[-2:] == [
        str(picture),
        "not drawn: dualpipev needs 2 micro-batches a rank: at least 8, not 4",
    ]
    assert picture.read_bytes()[:4] == b"\x89PNG"
    assert "draws a pipeline, and CONFIG has none" in refused(GPT2, ROOT, "--schedules", picture)
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
    assert {row["replicas"] for row in found["strategies"]} == {1, 2}
    shown = estimate(pipeline).stdout
    assert "1f1b *" in shown
    assert "schedules of 2 stages" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "no model is given"),
        (("--parameters", "6X"), "--parameters = '6X'"),
        ((GPT2, "--sequence-length", "64"), "given twice: CONFIG and --sequence-length"),
        (("--parameters", "6B", "--hf-config", "x"), "given twice: --parameters, --hf-config"),
        ((GPT2, "--parameters", "6B"), "given twice: CONFIG and --parameters"),
        (("--parameters", "6B", "--schedules", "a.png"), "give a CONFIG"),
        (("--parameters", "6B", "--slots", "0"), "must be 1 or more"),
        (("nonesuch.yaml",), "no such file"),
        (("--hf-config", "nonesuch"), "no such file or folder"),
    ],
)
def test_what_is_wrong_is_refused_with_a_fix(arguments: tuple[str, ...], says: str) -> None:
    assert says in refused(*arguments)
