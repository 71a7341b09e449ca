"""Every template on GPUs that few people here have: one, two or eight a machine, on one machine or two."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed.normalized import find_deepspeed_config
from determined_ds.config.reconcile import reconcile
from determined_ds.experiment.experiment import load_experiment
from tests.making import EXPERIMENTS, ROOT, refusals

TOO_FEW = "more-ranks-than-devices"
QUANTIZED = "zeropp-gradients-machines"


@pytest.mark.parametrize("machines", [1, 2])
@pytest.mark.parametrize("gpus", [1, 2, 8])
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_each_template_is_decided_or_refused_for_what_the_machines_lack(
    path: Path, gpus: int, machines: int
) -> None:
    experiment = load_experiment(path, (), name=path.name)
    hp = experiment.hyperparameters
    ds = find_deepspeed_config(hp, ROOT)
    gpu = Accelerator(name="cuda", num_devices=gpus, bf16=True, fp16=True)
    expected = set()
    if experiment.slots > gpus * machines:
        expected.add(TOO_FEW)
    if machines > 1 and ds.get(("zero_optimization", "zero_quantized_gradients")):
        expected.add(QUANTIZED)
    decide = partial(reconcile, hp, ds, slots=experiment.slots, accelerator=gpu, machines=machines)
    if expected:
        assert {problem.code for problem in refusals(decide)} == expected
        return
    resolved = decide()
    assert resolved.warnings == ()
    assert resolved.topology.slots == experiment.slots
    assert resolved.ds_config["bf16"]["enabled"] is True
    params = resolved.ds_config["optimizer"]["params"]
    offloaded = ds.get(("zero_optimization", "offload_optimizer", "device"), "none") != "none"
    is_muon = resolved.optimizer_type.lower() == "muon"  # its own, with an Adam of torch's beside it
    assert bool(params.get("torch_adam") and params.get("fused")) is not (offloaded or is_muon)
