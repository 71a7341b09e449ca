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
from typing import Any
from unittest import mock

import determined as det
import torch.distributed as dist
from determined import _info, core, gpu
from determined.core import _context

from determined_ds.checkpoints.files import checkpoint_at
from determined_ds.config.layout import Accelerator
from determined_ds.errors import ConfigError, Problem
from determined_ds.logs.reporting import reported_to_tools
from determined_ds.rundir.handed_on import STORE
from determined_ds.train.group.process_group import TorchDistributedContext, load_deepspeed
from determined_ds.train.here import Here, ScriptRun
from determined_ds.train.local_core import local_core_context, master_report

# There is no master. A name under .invalid is resolved nowhere (RFC 2606).
NO_MASTER = "http://no-master.invalid:80"
# Scripts and DeepSpeed look whether these are set; nothing listens there.
NOMINAL = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
NO_STORAGE = "checkpoint_storage of core.init() is not used here: checkpoints go to the run directory"


@contextlib.contextmanager
def surrounded(run: ScriptRun, accelerator: Accelerator) -> Iterator[None]:
    """In here a process is a rank of a run, as far as a script can see."""
    load_deepspeed(accelerator.name)
    for name, value in NOMINAL.items():
        os.environ.setdefault(name, value)
    is_chief, size = os.environ.get("RANK", "0") == "0", int(os.environ.get("WORLD_SIZE", "1"))
    with contextlib.ExitStack() as ending:

        def core_init(
            *,
            distributed: core.DistributedContext | None = None,
            checkpoint_storage: str | dict[str, Any] | None = None,
            preempt_mode: core.PreemptMode = core.PreemptMode.WorkersAskChief,
            tensorboard_mode: core.TensorboardMode = core.TensorboardMode.AUTO,
        ) -> core.Context:
            """In place of ``determined.core.init``, with its arguments: a context with files in the run directory."""
            if checkpoint_storage is not None and is_chief:
                print(f"warning: {NO_STORAGE}", file=sys.stderr)
            if distributed is None and size > 1:
                raise _unmet(f"core.init() needs to know the {size} ranks")
            run.listens = True
            trial = Here.of(run.experiment, run)
            context = local_core_context(
                run.run_dir,
                distributed or core.DummyDistributedContext(),
                trial.searcher,
                report=run.report,
                run=run,
                writes_scalars=core.TensorboardMode(tensorboard_mode) == core.TensorboardMode.AUTO,
                preempt_mode=core.PreemptMode(preempt_mode),
                info=det.get_cluster_info(),
            )
            if run.measurement is None:
                ending.enter_context(reported_to_tools(context, trial, accelerator, run_dir=run.there))
            return context

        replaced: list[tuple[Any, str, Any]] = [
            (_info, "_info", _cluster_info(run)),
            (core, "init", core_init),
            (_context, "init", core_init),
        ]
        if STORE in os.environ:  # not under another launcher
            meet = _meeting_by_files(os.environ[STORE])
            # Source: ``rendezvous`` in torch 2.13's ``distributed/rendezvous.py``; a function has its name, too.
            rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
            ending.enter_context(mock.patch.dict(rendezvous._rendezvous_handlers, {"env": meet}))
            names = ("from_torch_distributed", "from_deepspeed")
            replaced += [(core.DistributedContext, name, _met) for name in names]
        for replacement in replaced:
            ending.enter_context(mock.patch.object(*replacement))
        about = (run.experiment.config, run.experiment.hyperparameters.data, 0 if is_chief else 1)
        run.report = ending.enter_context(master_report(run.run_dir, *about))
        yield


def _cluster_info(run: ScriptRun) -> det.ClusterInfo:
    """What ``det.get_cluster_info()`` answers: the run's trial, on these machines."""
    machines, machine = (int(os.environ.get(name, "0")) for name in ("CROSS_SIZE", "CROSS_RANK"))
    local_size = int(os.environ.get("LOCAL_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    others = [f"machine-{number}.invalid" for number in range(1, machines)]  # only the first is known here
    name, trial_id = f"{run.run_dir.parent.name}/{run.run_dir.name}", run.there.trial_id()
    resumed = (run.resume_from or run.there.checkpoints / run.resume) if run.resume else None
    given, hparams = run.experiment.config, run.experiment.hyperparameters.data
    searcher = {"name": "single", "metric": "", "smaller_is_better": True, **(given.get("searcher") or {})}
    resources = {**(given.get("resources") or {}), "slots_per_trial": run.experiment.slots}
    storage = {"type": "directory", "container_path": str(run.there.checkpoints)}
    config = {"data": {}, "checkpoint_storage": storage, **given}
    config |= {"hyperparameters": dict(hparams), "searcher": searcher, "resources": resources}
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


def _meeting_by_files(store: str) -> Any:
    """Has process groups meet by files: runs on one machine do not disturb each other, and no port is open."""
    groups = count(1)

    def by_file(url: str, timeout: timedelta = dist.default_pg_timeout, **_: Any) -> Iterator[Any]:
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        found = dist.FileStore(f"{store}-{next(groups)}", size)
        found.set_timeout(timeout)
        yield found, rank, size

    return by_file


def _met(*_: Any, **__: Any) -> core.DistributedContext:
    """In place of ``DistributedContext.from_torch_distributed``: by the process group, instead of fixed TCP ports."""
    if dist.is_initialized():
        return TorchDistributedContext()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise _unmet("the ranks have not met yet")
    return core.DummyDistributedContext()


def _unmet(message: str) -> ConfigError:
    fix = "call deepspeed.init_distributed(), then core.init(distributed=DistributedContext.from_torch_distributed())"
    return ConfigError(Problem(key="distributed", message=message, fix=fix))
