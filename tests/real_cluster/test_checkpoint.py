"""A checkpoint is downloaded and registered, and its model loaded; by the checkout's code, and by its own."""

from __future__ import annotations

import secrets
from pathlib import Path

import torch

from determined_ds import load_model_from_checkpoint_path
from tests.command import ROOT
from tests.real_cluster.client import RealCluster
from tests.real_cluster.conftest import TINY

CONST = "experiments/gpt2/const.yaml"


def test_it_is_downloaded_registered_and_loaded(cluster: RealCluster, tmp_path: Path) -> None:
    [trial] = cluster.wait(cluster.create(CONST, *TINY))
    last = cluster.checkpoints(trial)[-1]
    assert last["metadata"]["steps_completed"] == 10

    version = cluster.register(f"real-cluster-{secrets.token_hex(4)}", last["uuid"])
    assert version["checkpoint"]["uuid"] == last["uuid"]

    got = tmp_path / "got"
    cluster.det("checkpoint", "download", last["uuid"], "-o", got)
    by_checkout = load_model_from_checkpoint_path(got, context_dir=ROOT).state_dict()
    by_itself = load_model_from_checkpoint_path(got, code="checkpoint").state_dict()
    assert by_checkout
    assert by_checkout.keys() == by_itself.keys()
    assert all(torch.equal(by_checkout[name], by_itself[name]) for name in by_checkout)
