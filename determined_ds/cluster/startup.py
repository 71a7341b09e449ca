"""What ``startup-hook.sh`` runs once the packages are installed: variables of the ranks, and whether to start any.

    variables=$(python3 -m determined_ds.cluster.startup) || exit $?

Commands for the shell that sources the hook go to stdout, messages to stderr. It loads no torch; what cannot be decided
without it, or before the ranks have started, is left to the ranks, which decide by the same code.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from determined_ds.cluster.log import NO_RESTART_HELPS, WARNING, error_lines, lines_of
from determined_ds.devices import GPU_NODES, detect_without_torch, threads_per_rank
from determined_ds.errors import ConfigError, EntrypointError
from determined_ds.experiment.decide import no_length
from determined_ds.experiment.entrypoint import read_entrypoint
from determined_ds.extensions import before_ranks
from determined_ds.train.rank import Here

# Where determined 0.38.1 writes which of an allocation's containers this is (``determined/_info.py``).
RENDEZVOUS = Path("/run/determined/info/rendezvous.json")
# A container that ends with an error ends the others: the first may need this long to report why.
FIRST_SAYS_WHY_S = 10.0


def main() -> int:
    """Answer for the task that the environment describes. Returns the exit code of the task, 0 to continue."""
    ids = os.environ.get("DET_SLOT_IDS")
    if not ids:  # not in a task on a cluster
        return 0
    slots = max(1, len(json.loads(ids) or []))  # ranks on this machine
    is_trial = os.environ.get("DET_TASK_TYPE") == "TRIAL"
    # On CPU slots DeepSpeed's launcher starts a rank for each NUMA node unless the number of slots is set.
    # On GPUs it counts these itself, and sets the variable anew for every rank.
    wanted: dict[str, object] = {"LOCAL_SIZE": slots}
    if is_trial:
        wanted["OMP_NUM_THREADS"] = threads_per_rank(slots)
        if not json.loads(os.environ["DET_EXPERIMENT_CONFIG"]).get("debug"):  # without warnings
            wanted["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # torch's of a host without a name
            if not any(Path(node).exists() for node in GPU_NODES):
                wanted["DS_ACCELERATOR"] = "cpu"
    exports = [f"export {name}={value}" for name, value in wanted.items() if not os.environ.get(name)]
    exit_now = None
    if is_trial:
        # The context directory is first: `python3 scripts/train.py` alone finds only what lies beside it.
        path = os.pathsep.join(filter(None, [str(Path.cwd()), os.environ.get("PYTHONPATH")]))
        exports.append(f"export PYTHONPATH={shlex.quote(path)}")
        exit_now = refused(os.environ, slots)
    print("\n".join(exports))
    if exit_now == 0:
        print("exit 0")
    return exit_now or 0


def refused(environment: Mapping[str, str], slots: int) -> int | None:
    """Decide what the ranks on these slots would decide, and report why they would refuse it.

    Returns:
        The exit code to end the task with: 0 for a point that its searcher drops. None where ranks can start.
    """
    config = json.loads(environment["DET_EXPERIMENT_CONFIG"])
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    for option in ("--accelerator", "--measure", "--engine"):
        parser.add_argument(option)
    parser.add_argument("--test", action="store_true")
    try:
        entrypoint = read_entrypoint(config.get("entrypoint"))
        options, _ = parser.parse_known_args(entrypoint.options)
    except (EntrypointError, argparse.ArgumentError):  # the user's own command, which may do anything
        return None
    if entrypoint.is_script or entrypoint.is_legacy:  # its code may state what it trains with
        return None
    ranks = (config.get("resources") or {}).get("slots_per_trial") or slots
    machines, trial = -(-ranks // slots), None
    try:
        hparams = json.loads(environment["DET_HPARAMS"])
        trial = Here.of_mappings(hparams, config, int(environment["DET_TRIAL_SEED"]), on_cluster=True)
        if (accelerator := detect_without_torch(options.accelerator)) is None:
            return None
        resolved = trial.resolve(accelerator, ranks=ranks, machines=machines)
        missing = no_length(trial.hyperparameters)
        if missing and not options.test and not options.measure:
            raise ConfigError(missing)
        if options.engine in (None, "deepspeed"):
            before_ranks(resolved, os.environ)
    except ConfigError as error:
        drops, is_first = trial is not None and trial.drops_point(error), True
        if machines > 1:  # wait until all of the allocation's containers are there
            meet = [sys.executable, "-m", "determined.exec.prep_container", "--rendezvous"]
            if subprocess.call(meet, stdout=subprocess.DEVNULL) == 0:  # else rather reported twice
                is_first = json.loads(RENDEZVOUS.read_text())["container_rank"] == 0
        if drops and is_first:
            _drop(error)
        elif is_first:
            print(*error_lines(error), NO_RESTART_HELPS, sep="\n", file=sys.stderr, flush=True)
        elif not drops:
            time.sleep(FIRST_SAYS_WHY_S)
        return 0 if drops else error.exit_code
    return None


def _drop(error: ConfigError) -> None:
    """Have the searcher drop this point, and report why."""
    from determined.common import util
    from determined.common.api import authentication, certs, errors

    from determined_ds.cluster.core_context import RETRIES

    for problem in error.problems:
        dropped = lines_of(WARNING, f"this point cannot run, and is dropped: {problem}")
        print(*dropped, sep="\n", file=sys.stderr, flush=True)
    master = os.environ["DET_MASTER"]
    session = authentication.login_from_task(master, cert=certs.default_load(master))
    os.environ.setdefault("DET_RETRY_CONFIG", json.dumps(RETRIES))
    session = session.with_retry(util.get_max_retries_config())
    try:
        body = {"reason": "EXITED_REASON_INVALID_HP"}
        session.post(f"/api/v1/trials/{os.environ['DET_TRIAL_ID']}/early_exit", json=body)
    except errors.APIException as refusal:
        if refusal.status_code != 400:  # it has been reported already
            raise


if __name__ == "__main__":
    sys.exit(main())
