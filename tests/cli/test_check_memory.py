"""``det-ds check --memory``: its JSON, and what would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from tests.harness.command import ROOT
from tests.memory.estimates import estimate, settings

GPT2, PIPELINE = (ROOT / "experiments" / "gpt2" / f"{name}.yaml" for name in ("const", "pipeline"))


def shown(*arguments: str | Path | int) -> str:
    result = CliRunner().invoke(main, ["check", *map(str, arguments), "--memory"])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_that_nothing_fits_is_an_answer() -> None:
    large = (str(GPT2), str(ROOT), *settings(model_size="xl"))
    assert "ZeRO 1 *" in shown(*large, "--gpu-memory", "24GiB")
    assert "fix: use GPUs of " in shown(*large, "--gpu-memory", "2GiB")
    mistaken = CliRunner().invoke(main, ["check", "--memory", "--parameters", "1B", "--gpu-memory", "80"])
    assert "--gpu-memory = '80': is 80 B, which no GPU has" in mistaken.output


def test_a_pipeline_is_shown_under_every_schedule_that_it_can_have() -> None:
    found = estimate(PIPELINE)
    rows = {(row["schedule"], row["chunks"]): row for row in found["schedules"]}
    micro_batches = found["strategies"][0]["accumulation"]
    assert {("zb-h1", 1), ("dualpipev", 2)} <= rows.keys()
    assert [name for name, row in rows.items() if row["is_configured"]] == [("1f1b", 1)]
    assert rows["1f1b", 1]["bubble"] == pytest.approx(1 / (micro_batches + 1))
    assert rows["1f1b", 1]["most_held"] == [2, 1]
    assert rows["gpipe", 1]["most_held"] == [micro_batches] * 2
    most = {name: max(stage["total_bytes"] for stage in row["stages"]) for name, row in rows.items()}
    assert most["gpipe", 1] > most["interleaved", 2] > most["1f1b", 1]
    [own] = [row for row in found["strategies"] if row["name"] == "a pipeline of 2 with ZeRO 0"]
    assert own["total_bytes"] == most["1f1b", 1]
