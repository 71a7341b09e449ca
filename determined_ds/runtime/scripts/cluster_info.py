"""What ``det.get_cluster_info()`` answers in a script under ``det-ds run``: the run's trial, on this machine."""

from __future__ import annotations

import os
import socket
from typing import Any

import determined as det
from determined import _info, gpu

from determined_ds.protocol.checkpoint_files import checkpoint_at
from determined_ds.runtime.scripts.given_run import ScriptRun

# There is no master. A name under .invalid is resolved nowhere (RFC 2606).
NO_MASTER = "http://no-master.invalid:80"
# What a master fills in where an experiment does not state it. Source: determined 0.38.1's ``expconf/v0`` schemas.
DEFAULTS: dict[str, Any] = {
    "data": {},
    "debug": False,
    "max_restarts": 5,
    "min_checkpoint_period": {"batches": 0},
    "min_validation_period": {"batches": 0},
    "perform_initial_validation": False,
    "records_per_epoch": 0,
    "scheduling_unit": 100,
    "checkpoint_policy": "best",
}


class LocalClusterInfo(det.ClusterInfo):
    """The information about a trial that no cluster runs."""


def cluster_info() -> det.ClusterInfo | None:
    """What ``det.get_cluster_info()`` says on a cluster; None elsewhere, under ``det-ds run`` too."""
    info = det.get_cluster_info()
    return None if isinstance(info, LocalClusterInfo) else info


def give_cluster_info(run: ScriptRun) -> None:
    """Have ``det.get_cluster_info()`` answer with a run's trial.

    Args:
        run: Of this process.
    """
    _info._info = _info_of(run)


def _info_of(run: ScriptRun) -> LocalClusterInfo:
    machines, machine = (int(os.environ.get(name, "0")) for name in ("CROSS_SIZE", "CROSS_RANK"))
    size = int(os.environ.get("WORLD_SIZE", "1"))
    local_size = int(os.environ.get("LOCAL_SIZE", str(size)))
    name = f"{run.run_dir.parent.name}/{run.run_dir.name}"
    trial_id = run.there.trial_id()
    config = config_of(run)
    return LocalClusterInfo(
        master_url=NO_MASTER,
        cluster_id="det-ds",
        agent_id=socket.gethostname(),
        slot_ids=list(range(local_size)),
        task_id=name,
        allocation_id=f"{name}.1",
        session_token="",
        task_type="TRIAL",
        latest_checkpoint=run.resume or (run.fork.name if run.fork else None),
        trial_info=det.TrialInfo(
            trial_id=trial_id,
            experiment_id=trial_id,
            trial_seed=run.experiment.trial_seed,
            hparams=dict(run.hparams),
            config=config,
            steps_completed=_steps_of(run),
            trial_run_id=1,
            debug=bool(config["debug"]),
            inter_node_network_interface=None,
        ),
        rendezvous_info=det.RendezvousInfo(
            container_addrs=_addresses(max(1, machines)),
            container_rank=machine,
            container_slot_counts=[local_size] * max(1, machines),
        ),
        resources_info=det.ResourcesInfo(gpu.get_gpu_uuids() if run.accelerator == "cuda" else []),
    )


def config_of(run: ScriptRun) -> dict[str, Any]:
    """The experiment's configuration, with what a master fills in and scripts read."""
    config = {**DEFAULTS, **run.experiment.config}
    config["hyperparameters"] = dict(run.hparams)
    config["searcher"] = {"name": "single", "metric": "", "smaller_is_better": True} | dict(
        config.get("searcher") or {}
    )
    config["resources"] = {**(config.get("resources") or {}), "slots_per_trial": run.experiment.slots}
    config["profiling"] = {"enabled": False} | dict(config.get("profiling") or {})
    config["checkpoint_storage"] = config.get("checkpoint_storage") or {
        "type": "directory",
        "container_path": str(run.there.checkpoints),
    }
    return config


def _steps_of(run: ScriptRun) -> int:
    return max(0, checkpoint_at(run.resumed).steps_completed) if run.resumed is not None else 0


def _addresses(machines: int) -> list[str]:
    """One for each machine; only the first is known here."""
    first = os.environ.get("MASTER_ADDR", "127.0.0.1")
    return [first, *(f"machine-{number}.invalid" for number in range(1, machines))]
