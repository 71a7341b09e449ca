"""Machines that die, are cut off and come back under torchrun: the run gets smaller, and larger again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.harness.machines import Machine, joined_machines, why_no_machines
from tests.harness.ranks import ROOT, free_port
from tests.harness.required import skip_or_fail
from tests.interrupted.compared import losses_of
from tests.package import records
from tests.recovery.runs import faulty, result, run

pytestmark = [pytest.mark.programs, pytest.mark.long("torchrun waits for machines that are gone")]
WITHIN_S = 240.0  # a guard against hangs


class Elastic:
    """An experiment of some batches under one torchrun of one rank on each of several machines."""

    def __init__(self, machines: tuple[Machine, ...], *, batch: int, batches: int) -> None:
        self.machines, self.run_dir = machines, machines[0].shared / "run"
        config = faulty("zero2", plain=True)
        fit = config["hyperparameters"]["fit"]
        fit |= {
            "max_length": {"batches": batches},
            "checkpoint_period": {"batches": 5},
            "reporting_period": {"batches": 1},
        }
        config["hyperparameters"] |= {"global_batch_size": batch, "num_workers": 0}
        del config["hyperparameters"]["deepspeed_config"]["val"]["gradient_accumulation_steps"]
        self.config, self._port = config, free_port()
        (machines[0].shared / "run.yaml").write_text(yaml.safe_dump(config))
        self.agents: dict[int, subprocess.Popen[str]] = {}
        for number in range(len(machines)):
            self.start(number)

    def start(self, number: int) -> None:
        """Start the torchrun of a machine."""
        machine, first = self.machines[number], self.machines[0]
        conf = f"is_host={int(number == 0)},last_call_timeout=4,keep_alive_interval=1,join_timeout=200"
        words = ["--nnodes", f"1:{len(self.machines)}", "--nproc_per_node", "1", "--max_restarts", "9"]
        words += [
            "--rdzv_backend",
            "c10d",
            "--rdzv_endpoint",
            f"{first.address}:{self._port}",
            "--rdzv_conf",
            conf,
        ]
        words += [
            "--local_addr",
            machine.address,
            "-m",
            "determined_ds.cli",
            "run",
            str(first.shared / "run.yaml"),
        ]
        words += [str(ROOT), "--accelerator", "cpu", "--run-dir", str(self.run_dir), "--resume"]
        env = {"DETERMINED_DS_HANG_TIMEOUT": "0.1", "FAULTS": json.dumps({"slow": 0.3})}
        # torch 2.13 would not say a machine that comes later where rank 0 is: it does so in the first round alone.
        env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        output = first.shared / f"said{number}-{len(list(first.shared.glob('said*')))}"
        self.agents[number] = machine.start(command, env=env, output=output)

    def wait(self, what: Callable[[], bool]) -> None:
        """Wait until something is so."""
        until = time.monotonic() + WITHIN_S
        while not what():
            assert time.monotonic() < until, self.said()
            assert self.agents[0].poll() is None, self.said()
            time.sleep(0.2)

    def trained(self, batch: int, ranks: int) -> bool:
        """Whether so many ranks have trained a batch."""
        steps = [step for step, _ in records(self.run_dir, "training")] if self.run_dir.exists() else []
        return bool(steps) and steps[-1] >= batch and self.ranks()[-1] == ranks

    def ranks(self) -> list[int]:
        """The ranks that trained after each start."""
        lines = (self.run_dir / "launches.jsonl").read_text().splitlines()
        return [json.loads(line)["slots"] for line in lines]

    def said(self) -> str:
        return "\n".join(path.read_text() for path in sorted(self.machines[0].shared.glob("said*")))


@pytest.fixture(autouse=True)
def _needs_machines() -> None:
    if reason := why_no_machines():
        skip_or_fail("machines", reason)


def test_machines_that_are_killed_cut_off_and_back_change_the_ranks_and_no_loss(tmp_path: Path) -> None:
    """Three machines; one is killed, another one cut off, and a third one comes: 3, 2, 1 and 2 ranks."""
    with joined_machines(tmp_path / "machines", 4) as machines:
        elastic = Elastic(machines[:3], batch=12, batches=60)
        elastic.wait(lambda: elastic.trained(6, 3))
        machines[2].end()
        elastic.wait(lambda: elastic.trained(12, 2))
        machines[1].cut()
        elastic.wait(lambda: elastic.trained(18, 1))
        elastic.machines = (*machines[:2], machines[3])
        elastic.start(2)
        elastic.wait(lambda: elastic.trained(24, 2))
        assert elastic.agents[0].wait(WITHIN_S) == 0, elastic.said()
        ranks = [
            now for now, before in zip(elastic.ranks(), [0, *elastic.ranks()], strict=False) if now != before
        ]
        assert ranks == [3, 2, 1, 2]
        assert run(elastic.config, tmp_path / "whole").returncode == 0
        assert losses_of(elastic.run_dir) == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
        assert len(result(elastic.run_dir)["recoveries"]) >= 3


def test_a_rank_with_which_the_batch_cannot_be_shared_is_idle(tmp_path: Path) -> None:
    with joined_machines(tmp_path / "machines", 3) as machines:
        elastic = Elastic(machines, batch=8, batches=10)
        assert [agent.wait(WITHIN_S) for agent in elastic.agents.values()] == [0, 0, 0], elastic.said()
        assert "torchrun started 3 ranks, which cannot share a batch: idle are 2" in elastic.said()
        assert "rank 2 is idle: 2 of 3 ranks train" in elastic.said()
        assert elastic.ranks() == [2]
        assert run(elastic.config, tmp_path / "whole").returncode == 0
        assert losses_of(elastic.run_dir) == pytest.approx(losses_of(tmp_path / "whole"), rel=1e-5)
