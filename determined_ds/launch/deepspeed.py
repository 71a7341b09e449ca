"""Determined's launcher of DeepSpeed, safe for trials that span machines::

    entrypoint: python3 -m determined_ds.launch.deepspeed python3 -m determined_ds.train MODULE:TRIAL

``determined.launch.deepspeed`` sends the first machine's environment and the command to the others as text: through
DeepSpeed's runner, pdsh and a remote shell, each of which reads quotes, ``$`` and ``%`` in its own way. Values arrive
changed or the launch fails with a syntax error, and DeepSpeed logs all of them, the session token and storage keys too.
Here every machine keeps its own environment and the command in a file that only its user can read, for the ranks on it.
Determined's launcher does the rest.

Source: ``main`` and ``create_deepspeed_env_file`` in determined 0.38.1's ``launch/deepspeed.py``; ``main`` in deepspeed
0.19.8's ``launcher/runner.py``, ``add_export`` and ``PDSHRunner`` in its ``launcher/multinode_runner.py``.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, MutableMapping
from pathlib import Path

# Beside what Determined's prep_container writes for this container.
KEPT = Path("/run/determined/info/determined_ds_launch.json")
RANK = "--rank"  # this module starts a rank by what was kept
# What DeepSpeed's launcher sets for a rank (``main`` in its ``launcher/launch.py``).
OF_A_RANK = (
    *(
        "RANK",
        "LOCAL_RANK",
        "WORLD_SIZE",
        "LOCAL_SIZE",
        "CROSS_RANK",
        "CROSS_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
    ),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
# Prefixes of variables that DeepSpeed's runner sends by itself ...
SENT = ("MLFLOW", "MV2", "NCCL", "PYTHON", "UCX")
# ... and those without which another machine may not find Python and Determined, before the rest is read.
NEEDED = ("LD_LIBRARY_PATH", "PATH", "PYTHONPATH", "PYTHONUSERBASE")


def keep(path: Path, environment: MutableMapping[str, str], script: list[str]) -> None:
    """Keep what the ranks of this machine start with; DeepSpeed sends only what is needed.

    Args:
        path: The file.
        environment: Of this machine's ranks; what DeepSpeed would send of it is removed.
        script: Their command.
    """
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"environment": dict(environment), "script": script}, file)
    for name in [name for name in environment if name.startswith(SENT) and name not in NEEDED]:
        del environment[name]


def become_rank(path: Path) -> None:
    """Become the rank that DeepSpeed's launcher has started here, with what was kept on this machine."""
    kept = json.loads(path.read_text())
    own = {name: os.environ[name] for name in OF_A_RANK if name in os.environ}
    environment = {**kept["environment"], "USE_DEEPSPEED": "1", **own}
    os.execvpe(kept["script"][0], kept["script"], environment)


def main(arguments: list[str]) -> int:
    """Launch the ranks of a trial. Returns the exit code."""
    from deepspeed.launcher import runner
    from determined.launch import deepspeed as launcher

    script = launcher.parse_args(arguments)
    create_sshd_cmd: Callable[[], list[str]] = launcher.create_sshd_cmd

    def keep_first() -> list[str]:
        """Determined's launcher calls it on every machine, once it has set the variables that are its own."""
        keep(KEPT, os.environ, script)
        return create_sshd_cmd()

    def send_needed() -> None:
        lines = [f"{name}={os.environ[name]}\n" for name in NEEDED[:2] if name in os.environ]
        Path(runner.DEEPSPEED_ENVIRONMENT_NAME).write_text("".join(lines))

    launcher.create_sshd_cmd = keep_first
    launcher.create_deepspeed_env_file = send_needed
    return int(launcher.main(["python3", "-m", "determined_ds.launch.deepspeed", RANK, str(KEPT)]))


if __name__ == "__main__":
    if sys.argv[1:2] == [RANK]:
        become_rank(Path(sys.argv[2]))
    sys.exit(main(sys.argv[1:]))
