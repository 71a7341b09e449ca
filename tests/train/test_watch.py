"""A machine that dies, and a cut cable, are named by all that is left; a long upload is not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds.errors import EXIT_CRASHED, ConfigError
from tests.harness.command import TIMEOUT_S as TOO_LONG_S
from tests.harness.machines import Machine
from tests.harness.ranks import Ranks, free_port
from tests.rundir.runs import TRIALS as PLAIN
from tests.rundir.runs import until
from tests.train.small import hyperparameters

HANG_TIMEOUT = "DETERMINED_DS_HANG_TIMEOUT"
TIMEOUT_S = 4.0
# Rank 0 of Uploads takes longer than the limit to store a checkpoint.
TRIALS = f"""{PLAIN}
import time

class Uploads(Plain):
    def __init__(self, context):
        super().__init__(context)
        if context.distributed.rank == 0:
            manager = context._core.checkpoint._storage_manager  # Determined's
            store = manager.post_store_path
            def slow(*args, **kwargs):
                time.sleep(7)
                store(*args, **kwargs)
                print("uploaded", flush=True)
            manager.post_store_path = slow
"""
EXPERIMENT = """
name: endless
entrypoint: python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:{trial}
resources: {{slots_per_trial: 2}}
hyperparameters:
  global_batch_size: 8
  deepspeed_config: {{type: const, val: {{optimizer: {{type: AdamW, params: {{lr: 0.01}}}}}}}}
  fit: {{max_length: {{batches: 1000000}}, reporting_period: {{batches: 1}}, checkpoint_policy: none,
    checkpoint_period: {{batches: 9}}}}
searcher: {{name: single, metric: validation_loss}}
"""


class Training:
    """A rank on each of two machines, started as somebody else's launcher does, with a run directory on shared storage.

    Args:
        machines: The two.
        trial: Of :data:`TRIALS`.
    """

    def __init__(self, machines: tuple[Machine, Machine], trial: str) -> None:
        folder, port = machines[0].shared, str(free_port())
        self._run_dir = folder / "run"
        self._run_dir.mkdir()
        (self._run_dir / "experiment.yaml").write_text(EXPERIMENT.format(trial=trial))
        (folder / "trial.py").write_text(TRIALS)
        self._outputs = [folder / f"{machine.name}.txt" for machine in machines]
        train = [sys.executable, "-m", "determined_ds.train", f"trial:{trial}", "--run-dir", self._run_dir]
        self._ranks = [
            machine.start(
                [*train, "--accelerator", "cpu"],
                cwd=folder,
                env={
                    # As torchrun's, of a rank alone on its machine.
                    "RANK": str(rank),
                    "LOCAL_RANK": "0",
                    "WORLD_SIZE": "2",
                    "LOCAL_WORLD_SIZE": "1",
                    "GROUP_RANK": str(rank),
                    "GROUP_WORLD_SIZE": "2",
                    "MASTER_ADDR": machines[0].address,
                    "MASTER_PORT": port,
                    HANG_TIMEOUT: str(TIMEOUT_S / 60),
                },
                output=self._outputs[rank],
            )
            for rank, machine in enumerate(machines)
        ]

    def said(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def goes_on(self) -> None:
        """Wait until batches are trained from now on."""
        metrics = self._run_dir / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        self.until(lambda: metrics.exists() and metrics.stat().st_size > size + 1000)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait until something is true, while both ranks live."""

        def alive() -> bool:
            assert not any(rank.poll() for rank in self._ranks), self.said(0) + self.said(1)
            return condition()

        until(alive)

    def code(self, rank: int) -> int:
        """Wait for the end of a rank."""
        return self._ranks[rank].wait(TOO_LONG_S)


@pytest.mark.long("two machines; lost ranks of one are named above")
def test_an_upload_takes_as_long_as_it_takes_and_a_cut_cable_is_named_on_both_machines(
    machines: tuple[Machine, Machine],
) -> None:
    training = Training(machines, "Uploads")
    training.until(lambda: "uploaded" in training.said(0))
    training.goes_on()
    machines[0].cut()
    assert [training.code(0), training.code(1)] == [EXIT_CRASHED, EXIT_CRASHED]
    assert "no sign of life from rank 1 (machine1) for 4 s: dead, stopped or cut off" in training.said(0)
    assert "no sign of life from rank 0 (machine0) for 4 s: dead, stopped or cut off" in training.said(1)
    assert "Traceback" not in training.said(0) + training.said(1)


@pytest.mark.long("two machines once more: test_an_upload_takes_as_long has a cut cable")
def test_a_machine_that_dies_is_named(machines: tuple[Machine, Machine]) -> None:
    """Its connections are closed, which the other one hears of at once, as an error of gloo's."""
    training = Training(machines, "Plain")
    training.goes_on()
    machines[1].die()
    assert training.code(0) not in (0, None)
    assert "no sign of life from rank 1 (machine1): dead, stopped or cut off" in training.said(0)


# --------------------------------------------------------------------------------- how ranks meet, and wait


def met(environment: dict[str, str]) -> dict[str, Any]:
    """In a rank: how it met the others, or what is refused."""
    import torch

    from determined_ds import open_context

    os.environ.update(environment)
    try:
        with open_context(hparams=hyperparameters(), accelerator="cpu") as context:
            group = torch.distributed.group.WORLD
            return {
                "ranks": context.distributed.allgather(context.distributed.rank),
                "port": os.environ["MASTER_PORT"],
                "interface": os.environ.get("GLOO_SOCKET_IFNAME"),
                "hours": group._get_backend(torch.device("cpu")).options._timeout.total_seconds() / 3600,
            }
    except ConfigError as error:
        return {"refused": str(error)}


def test_every_rank_is_as_patient_as_an_upload_may_be_long(two_ranks: Ranks) -> None:
    """Ranks wait for one another for days, whatever ends a hang; a limit that is no time is an error."""
    for found in two_ranks.run(met, {HANG_TIMEOUT: "10"}):
        assert (found["ranks"], found["hours"], found["interface"]) == ([0, 1], 7 * 24, None)
    for found in two_ranks.run(met, {HANG_TIMEOUT: "soon"}):
        assert f"{HANG_TIMEOUT} = " in found["refused"]


@pytest.mark.parametrize(
    ("given", "moves", "interface"),
    [
        ({"MASTER_PORT": "29500", "USE_DEEPSPEED": "1"}, True, None),
        ({"DET_INTER_NODE_NETWORK_INTERFACE": "lo"}, False, "lo"),  # and somebody's --master_port stays
        ({"GLOO_SOCKET_IFNAME": "lo", "DET_INTER_NODE_NETWORK_INTERFACE": "other"}, False, "lo"),
    ],
)
def test_ranks_meet_at_the_port_of_their_allocation_on_the_interface_that_somebody_named(
    given: dict[str, str], moves: bool, interface: str | None, two_ranks: Ranks
) -> None:
    """Ranks of DeepSpeed's launcher on one machine with another trial's would all take the same port."""
    port = str(free_port())
    for found in two_ranks.run(met, {**given, "C10D_PORT": port}):
        assert (found["ranks"], found["interface"]) == ([0, 1], interface)
        assert (found["port"] == port) is moves


ENDING = """
import sys
from determined_ds import open_context
from tests.package import show_signs_all_the_time

show_signs_all_the_time()
hparams = {"global_batch_size": 2, "deepspeed_config": {"optimizer": {"type": "AdamW", "params": {"lr": 0.01}}}}
with open_context(hparams=hparams, run_dir=sys.argv[1], accelerator="cpu") as context:
    context.distributed.allgather(None)
    sys.exit(0)
"""


def test_a_script_that_ends_while_its_rank_shows_a_sign_of_life_is_not_aborted(tmp_path: Path) -> None:
    """Python ends a thread that returns from a call of torch's store then, and C++ aborts the process."""
    address = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", ENDING, tmp_path],
            env={**os.environ, **address, "LOCAL_WORLD_SIZE": "2", "RANK": rank, "LOCAL_RANK": rank},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    said = [rank.communicate(timeout=TOO_LONG_S)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
