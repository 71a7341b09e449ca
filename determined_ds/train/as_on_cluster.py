"""What a script finds under ``det-ds run``: its trial, a core context with files, and ranks that meet by files.

That is: the run directory, resuming, test mode and preemption. There is no master behind it.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import socket
import sys
from collections.abc import Iterator
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any
from unittest import mock

import determined as det
import torch.distributed as dist
from determined import _info, core, gpu, ipc
from determined.core import _context

from determined_ds.checkpoints.files import checkpoint_at
from determined_ds.config.layout import Accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.logs.reporting import reported_to_tools
from determined_ds.rundir.handed_on import REPORT, STORE
from determined_ds.train.here import ScriptRun, task_of
from determined_ds.train.local_core import local_core_context
from determined_ds.train.upstream import load_deepspeed
from determined_ds.train.warning_keeper import warned

# There is no master. A name under .invalid is resolved nowhere (RFC 2606).
NO_MASTER = "http://no-master.invalid:80"
# Scripts and DeepSpeed look whether these are set; nothing listens there.
NOMINAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NO_STORAGE = "checkpoint_storage of core.init() is not used here: checkpoints go to the run directory"
NO_DISTRIBUTED = (
    "distributed=det.core.DistributedContext.from_torch_distributed(), after the process group is made"
)


@contextlib.contextmanager
def surrounded(run: ScriptRun, accelerator: Accelerator) -> Iterator[None]:
    """In here a process is a rank of a run, as far as a script can see.

    Args:
        run: The run.
        accelerator: What it computes on.
    """
    load_deepspeed(accelerator.name)
    for name, value in NOMINAL.items():
        os.environ.setdefault(name, value)
    if STORE in os.environ:  # not under another launcher
        _meet_by_files(os.environ[STORE])
    is_chief = os.environ.get("RANK", "0") == "0"
    with contextlib.ExitStack() as ending:

        def core_init(
            *,
            distributed: core.DistributedContext | None = None,
            checkpoint_storage: str | dict[str, Any] | None = None,
            preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
            tensorboard_mode: core.TensorboardMode = core.TensorboardMode.AUTO,
        ) -> core.Context:
            """In place of ``determined.core.init``, with its arguments: a context with files in the run directory.

            Raises:
                ConfigError: there are several ranks, and ``distributed`` is missing.
            """
            if checkpoint_storage is not None and is_chief:
                print(warned(f"warning: {NO_STORAGE}"), file=sys.stderr)
            size = int(os.environ.get("WORLD_SIZE", "1"))
            if distributed is None and size > 1:
                message, fix = (
                    f"core.init() needs to know the {size} ranks",
                    f"write core.init({NO_DISTRIBUTED})",
                )
                raise ConfigError(Problem(key="distributed", message=message, fix=fix))
            run.listens = True
            task = task_of(run.experiment)
            context = local_core_context(
                run.run_dir,
                distributed or core.DummyDistributedContext(),
                task.searcher,
                report=run.report,
                run=run,
                writes_scalars=core.TensorboardMode(tensorboard_mode) == core.TensorboardMode.AUTO,
                preempt_mode=core.PreemptMode(preempt_mode),
                info=det.get_cluster_info(),
            )
            if run.measurement is None:
                ending.enter_context(reported_to_tools(context, task, accelerator, run_dir=run.there))
            return context

        ending.enter_context(mock.patch.object(_info, "_info", _cluster_info(run)))
        for module in (core, _context):
            ending.enter_context(mock.patch.object(module, "init", core_init))
        if REPORT in os.environ and is_chief:
            from determined_ds.cluster.unmanaged import MasterReport

            point = run.experiment.hyperparameters.data
            run.report = ending.enter_context(MasterReport(run.run_dir, run.experiment.config, point))
        yield


def _cluster_info(run: ScriptRun) -> det.ClusterInfo:
    """What ``det.get_cluster_info()`` answers: the run's trial, on these machines."""
    machines, machine = (int(os.environ.get(name, "0")) for name in ("CROSS_SIZE", "CROSS_RANK"))
    local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    others = [f"machine-{number}.invalid" for number in range(1, machines)]  # only the first is known here
    name = f"{run.run_dir.parent.name}/{run.run_dir.name}"
    resumed = (run.resume_from or run.there.checkpoints / run.resume) if run.resume else None
    trial_id = run.there.trial_id()
    given, hparams = run.experiment.config, run.experiment.hyperparameters.data
    config = {
        "data": {},
        **given,
        "hyperparameters": dict(hparams),
        "searcher": {
            "name": "single",
            "metric": "",
            "smaller_is_better": True,
            **(given.get("searcher") or {}),
        },
        "resources": {**(given.get("resources") or {}), "slots_per_trial": run.experiment.slots},
        "checkpoint_storage": given.get("checkpoint_storage")
        or {"type": "directory", "container_path": str(run.there.checkpoints)},
    }
    return det.ClusterInfo(
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
            hparams=dict(hparams),
            config=config,
            steps_completed=max(0, checkpoint_at(resumed).steps_completed) if resumed else 0,
            trial_run_id=1,
            debug=bool(given.get("debug")),
            inter_node_network_interface=None,
        ),
        rendezvous_info=det.RendezvousInfo(
            container_addrs=[os.environ["MASTER_ADDR"], *others],
            container_rank=machine,
            container_slot_counts=[local_size] * max(1, machines),
        ),
        resources_info=det.ResourcesInfo(gpu.get_gpu_uuids() if run.accelerator == "cuda" else []),
    )


def _meet_by_files(store: str) -> None:
    """From now on process groups and Determined's contexts of this process meet by files, not at ports.

    Two runs on one machine do not disturb each other, and no port is open to others.

    Args:
        store: Path of the launcher's file.
    """
    groups, contexts = count(1), count(1)

    def by_file(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = dist.FileStore(f"{store}-{next(groups)}", size)
        found.set_timeout(timeout)
        yield found, rank, size

    def init_ipc(self: Any, force_tcp: bool) -> None:
        """As ``DistributedContext._init_ipc`` for ranks of one machine, by Unix sockets instead of fixed TCP ports.

        Source: determined 0.38.1's ``core/_distributed.py``.
        """
        if self.size < 2:  # rank 0 alone makes one to report to a master
            return
        number, self.tempdir = next(contexts), None
        for kind, suffix in (("", ""), ("_local", "-local")):
            name = f"ipc://{Path(store).parent}/{number}{suffix}"
            server: Any = None
            client: Any = None
            if self._is_chief:
                server = ipc.ZMQBroadcastServer(self.size - 1, f"{name}-pub", f"{name}-pull")
                server.safe_start()
            else:
                client = ipc.ZMQBroadcastClient(f"{name}-pub", f"{name}-pull")
                client.safe_start()
            setattr(self, f"{kind}_chief_zmq", server)
            setattr(self, f"{kind}_worker_zmq", client)

    # Source: ``rendezvous`` in torch 2.13's ``distributed/rendezvous.py``.
    rendezvous = importlib.import_module("torch.distributed.rendezvous")  # a function has its name, too
    rendezvous._rendezvous_handlers["env"] = by_file
    mock.patch.object(core.DistributedContext, "_init_ipc", init_ipc).start()
