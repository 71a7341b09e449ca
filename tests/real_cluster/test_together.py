"""As many trials at once as there are slots, two of them on one agent: they do not meet at a port."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.command import ROOT
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY

CONST = "experiments/gpt2/const.yaml"
ENTRYPOINT = str(yaml.safe_load((ROOT / CONST).read_text())["entrypoint"])
# Two starts may be some seconds apart.
LONGER = (*TINY, "hyperparameters.fit.max_length.batches=60", "resources.slots_per_trial=1")


@pytest.mark.parametrize("launcher", ["deepspeed", "torch_distributed"])
def test_trials_run_side_by_side_on_one_agent(cluster: RealCluster, launcher: str) -> None:
    """One slot a trial, and every slot taken: wherever an agent has two slots, two trials share it."""
    entrypoint = re.sub(r"determined\.launch\.\w+", f"determined.launch.{launcher}", ENTRYPOINT)
    slots = cluster.slots()
    if len({slot["agent"] for slot in slots}) == len(slots):
        pytest.skip("no agent has two slots")
    numbers = [cluster.create(CONST, *LONGER, f"entrypoint={entrypoint}") for _ in slots]
    trials = [trial for number in numbers for trial in cluster.wait(number)]
    assert [trial["restarts"] for trial in trials] == [0 for _ in trials]
    last = [
        cluster.allocations(trial)[-1] for trial in trials
    ]  # a scheduler may have moved it before it began
    assert max(start.started for start in last) < min(start.ended for start in last), "not at once"
    numbers_of = {str(cluster.metrics(trial)) for trial in trials}
    assert len(numbers_of) == 1, "the same experiment, other numbers"
