"""Good files with up to three things in them damaged: never a traceback, always the place and a fix.

Damaged texts are in ``documents/test_reading.py``, other values under each key in ``test_wrong_values.py``.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import yaml
from hypothesis import settings

from tests.harness.checked import findings
from tests.harness.command import ROOT
from tests.harness.damaging import damaged

NUM_MUTANTS = 6 * settings().max_examples
EXPERIMENTS = ROOT / "experiments"
GOOD = [*sorted(EXPERIMENTS.glob("gpt2/*.yaml")), *sorted(EXPERIMENTS.glob("deepspeed/*.json"))]


@pytest.mark.parametrize("seed", range(NUM_MUTANTS))
def test_whatever_is_changed_in_it(tmp_path: Path, seed: int) -> None:
    """A DeepSpeed JSON by itself, and in an experiment."""
    good, choices = GOOD[seed % len(GOOD)], random.Random(seed)
    mutant = yaml.safe_load(good.read_text())
    for _ in range(choices.randint(1, 3)):
        mutant = damaged(mutant, choices)
    written = {"a.yaml": mutant}
    if good.suffix == ".json":
        whole = yaml.safe_load((EXPERIMENTS / "gpt2/const.yaml").read_text())
        whole["hyperparameters"]["deepspeed_config"] = {"type": "const", "val": mutant}
        written = {"ds.json": mutant, "a.yaml": whole}
    for name, content in written.items():
        (tmp_path / name).write_text(json.dumps(content, indent=2))
    for each in findings(*(tmp_path / name for name in written), "--context", ROOT):
        assert each.message
        assert each.fix, each
        assert 1 <= each.line <= Path(each.file).read_text().count("\n") + 1, each
        assert each.column >= 1
