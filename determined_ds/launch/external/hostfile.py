"""``det-ds run --hostfile``: DeepSpeed's launcher starts the ranks, by pdsh over ssh. Loads no torch."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NoReturn

from determined_ds.config.params import AUTO
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.decide import Problems, read_document
from determined_ds.experiment.experiment import Experiment, parse_experiment
from determined_ds.launch.external.placement import PORTS
from determined_ds.launch.options import RunOptions
from determined_ds.protocol.handed_on import count

SLOTS = ("resources", "slots_per_trial")
LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?")


def read_hostfile(path: Path) -> dict[str, int]:
    """The machines and their slots, in order.

    Raises:
        ConfigError: every line that DeepSpeed's launcher would reject.

    Source: ``_parse_hostfile`` in deepspeed 0.19.8's ``launcher/runner.py``.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        message = f"cannot be read: {error.strerror or error}"
        raise ConfigError(
            _problem(path, message, "give a file with a line for each machine: node1 slots=8")
        ) from None
    hosts: dict[str, int] = {}
    problems = []
    for number, text in enumerate(map(str.strip, lines), start=1):
        if not text or text.startswith("#"):
            continue
        match = LINE.fullmatch(text)
        if match is None or not int(match[2]):
            problems.append(
                _problem(path, f"{text!r} is not HOST slots=N", "write e.g. node1 slots=8", number)
            )
        elif match[1] in hosts:
            problems.append(
                _problem(path, f"{match[1]} is there twice", "give each machine one line", number)
            )
        else:
            hosts[match[1]] = int(match[2])
    if not hosts and not problems:
        problems.append(_problem(path, "names no machine", "write a line for each: node1 slots=8"))
    if problems:
        raise ConfigError(problems)
    return hosts


def _problem(path: Path, message: str, fix: str, line: int = 0) -> Problem:
    origin = f"{path}:{line}" if line else str(path)
    return Problem(key="--hostfile", origin=origin, message=message, fix=fix, code="hostfile")


def run_on_hosts(hostfile: Path, options: RunOptions) -> NoReturn:
    """Become DeepSpeed's launcher, which starts ``det-ds`` as each of the ranks.

    Args:
        hostfile: Of the machines; the code is at the same path on each of them.
        options: What to run.

    Raises:
        ConfigError: the machines do not have the experiment's slots, or pdsh is not installed.
    """
    found = Problems()
    document = read_document(
        options.config, options.context_dir, slots=options.stated_slots, overrides=options.overrides
    )
    experiment = found.of(lambda: parse_experiment(document))
    hosts = found.of(lambda: read_hostfile(hostfile))
    if experiment and hosts and options.slots != AUTO:
        found.problems += _slots_differ(experiment, hosts, hostfile)
    found.problems += [
        Problem(
            key="--hostfile",
            message=f"DeepSpeed's launcher needs {program}, which is not on PATH",
            fix=f"install it (Debian: apt-get install {package}), or start the ranks by torchrun on each machine",
            code="hostfile",
        )
        for program, package in {"pdsh": "pdsh", "ssh": "openssh-client"}.items()
        if shutil.which(program) is None
    ]
    found.raise_any()
    # As one word that no shell on the way changes; each rank has its slots from the launcher.
    words = options.words(without=("slots", "hostfile"))
    given = base64.urlsafe_b64encode(json.dumps(words).encode()).decode()
    port = PORTS.start + os.getpid() % len(PORTS)  # DeepSpeed's own is the same for all runs
    command = [sys.executable, "-m", "deepspeed.launcher.runner", "--hostfile", str(hostfile)]
    command += ["--launcher", "pdsh", "--force_multi", "--master_port", str(port), "--log_level", "warning"]
    command += ["--no_local_rank", "--module", "determined_ds.cli.given", given]
    sys.stdout.flush()
    os.execv(sys.executable, command)


def _slots_differ(experiment: Experiment, hosts: dict[str, int], hostfile: Path) -> list[Problem]:
    total = sum(hosts.values())
    if total == experiment.slots:
        return []
    message = f"{hostfile} has {count(total, 'slot')} on {count(len(hosts), 'machine')}"
    fix = f"add --slots {total}, or change slots= in {hostfile}"
    return [experiment.document.problem(SLOTS, message, fix, "hostfile-slots")]
