"""Random runs that meet one to three faults each: every one ends by itself as an undisturbed run does."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.interrupted.compared import differences, losses_of
from tests.recovery.runs import NUM_BATCHES, ON_SPIKE, faulty, poison_of, result, run, words

pytestmark = pytest.mark.long("sixty runs")
FORMS = ("zero0", "zero1", "zero2", "zero3", "pipeline", "gpipe", "zb-h1", "interleaved", "session")
KINDS = ("oom", "poison", "kill")


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[Path], Any]], Any]:
    """``known(key, make)``: what ``make(folder)`` gives, made once for each key."""
    found: dict[str, Any] = {}

    def once(key: str, make: Callable[[Path], Any]) -> Any:
        if key not in found:
            found[key] = make(tmp_path_factory.mktemp("known"))
        return found[key]

    return once


@pytest.mark.parametrize("seed", range(60))
def test_it_ends_as_an_undisturbed_run(
    seed: int, known: Callable[[str, Callable[[Path], Any]], Any], tmp_path: Path
) -> None:
    """Bit for bit where micro-batches stay as they are, and otherwise to rounding."""
    draw = random.Random(seed)
    form = draw.choice(FORMS)
    kinds = draw.sample(KINDS, draw.randint(1, 3))
    if form == "session" and "oom" in kinds:  # its dropout would differ
        kinds = ["poison", "kill"]
    shrinks, spike = "oom" in kinds, draw.randint(13, 19)
    config = faulty(form, plain=shrinks, on_spike=ON_SPIKE)
    if shrinks:
        del config["hyperparameters"]["deepspeed_config"]["val"]["gradient_accumulation_steps"]
        config["hyperparameters"]["micro_batch_size"] = 2
    faults: dict[str, Any] = {}
    if shrinks:
        faults |= {"oom": draw.randint(1, NUM_BATCHES - 1), "fits": 1}
    if "kill" in kinds:
        faults["kill"] = draw.randint(1, NUM_BATCHES - 1)
    if "poison" in kinds:
        about = json.dumps([config, spike])
        faults["poison"] = known(f"poison {about}", lambda folder: poison_of(spike, config, folder))
    done = run(config, tmp_path / "run", **faults)
    assert done.returncode == 0, (form, faults, done.stderr)
    assert len(result(tmp_path / "run")["recoveries"]) == len(kinds), (form, faults, done.stderr)

    def undisturbed(folder: Path) -> Path:
        fit = config["hyperparameters"]["fit"]
        skip = {"skip_batches": [spike - 1, spike + 1]} if "poison" in kinds else {}
        told = {**config, "hyperparameters": {**config["hyperparameters"], "fit": {**fit, **skip}}}
        poison = {"poison": faults["poison"]} if "poison" in kinds else {}
        assert run(told, folder / "run", **poison).returncode == 0
        return folder / "run"

    whole = known(json.dumps([config, spike if "poison" in kinds else 0]), undisturbed)
    if shrinks:
        assert losses_of(tmp_path / "run") == pytest.approx(losses_of(whole), rel=1e-3), (form, faults)
    else:
        assert differences(words(whole), words(tmp_path / "run")) == [], (form, faults)
