"""A machine that dies, a cable that is cut and a rank that hangs are told by all that is left; a long upload is not."""

from __future__ import annotations

import json
import os
import sys

import pytest

from determined_ds.errors import EXIT_CRASHED, ConfigError
from determined_ds.protocol.handed_on import HANG_TIMEOUT, hang_timeout_s
from determined_ds.runtime.group.distributed import join_process_group
from determined_ds.runtime.group.peers import PeerSign, PeerVerdict, RollCall
from tests.command import TIMEOUT_S as TOO_LONG_S
from tests.launch.ranks.test_hang import STUCK
from tests.launch.test_trial_process import EXPERIMENT, TRIAL, until
from tests.machines import Machine
from tests.ranks import Ranks, free_port
from tests.runtime.group.test_addresses import CPU, environment_of_rank

# ------------------------------------------------------------------------------------------- the judge

TICK_S = 0.1


class Played:
    """Signs of ranks that are played here, and looked at every :data:`TICK_S`."""

    def __init__(self, size: int) -> None:
        self.signs = [PeerSign(steps=3) for _ in range(size)]
        self.roll = RollCall(size, timeout_s=10, few_s=1)
        self.roll.look(self.signs, TICK_S)

    def change(self, rank: int, **what: object) -> None:
        self.signs[rank] = PeerSign(**{**vars(self.signs[rank]), **what})

    def live_for(self, seconds: float, *, silent: tuple[int, ...] = ()) -> PeerVerdict | None:
        """Each shows signs of life, but none of progress."""
        for _ in range(round(seconds / TICK_S)):
            for rank, sign in enumerate(self.signs):
                if rank not in silent:
                    self.change(rank, count=sign.count + 1)
            if verdict := self.roll.look(self.signs, TICK_S):
                return verdict
        return None


def test_ranks_that_are_not_heard_of_are_lost_whatever_the_others_do() -> None:
    ranks = Played(4)
    ranks.change(0, patient=True)
    assert ranks.live_for(9.8, silent=(2, 3)) is None
    assert ranks.roll.missing == (2, 3)
    assert ranks.live_for(1, silent=(2, 3)) == PeerVerdict(lost=(2, 3), steps=3)


def test_one_that_is_heard_of_again_is_not_lost() -> None:
    ranks = Played(2)
    ranks.change(0, patient=True)
    for _ in range(3):
        assert ranks.live_for(9, silent=(1,)) is None
        assert ranks.live_for(1) is None
        assert ranks.roll.missing == ()


def test_of_ranks_that_live_and_do_not_move_the_one_that_waits_for_no_other_hangs() -> None:
    ranks = Played(3)
    for rank in (0, 1):
        ranks.change(rank, waits=True)
    assert ranks.live_for(9.8) is None
    assert ranks.live_for(1) == PeerVerdict(behind=(2,), steps=3)


def test_the_rank_with_the_fewest_batches_hangs() -> None:
    ranks = Played(2)
    ranks.change(0, steps=2, waits=True)
    assert ranks.live_for(11) == PeerVerdict(behind=(0,), steps=2)


@pytest.mark.parametrize("busy", [{"patient": True}, {"done": True}])
def test_what_may_take_long_is_waited_for(busy: dict[str, bool]) -> None:
    ranks = Played(2)
    ranks.change(1, **busy)
    assert ranks.live_for(1000) is None
    ranks.change(1, patient=False, done=False)
    assert ranks.live_for(11) is not None


def test_before_the_first_step_ranks_have_to_live_not_to_move() -> None:
    ranks = Played(2)
    for rank in (0, 1):
        ranks.change(rank, steps=0)
    assert ranks.live_for(1000) is None
    assert ranks.live_for(11, silent=(0,)) == PeerVerdict(lost=(0,))


# ------------------------------------------------------------------------------------------- on two machines

TIMEOUT_S = 4.0
# Rank 0 takes longer than that to put a checkpoint into storage.
UPLOADS = """
import time
from determined_ds.runtime.local_core import AtomicStorage

class Slow(AtomicStorage):
    def post_store_path(self, *args, **kwargs):
        time.sleep(7)
        super().post_store_path(*args, **kwargs)
        print("uploaded", flush=True)

class Uploads(Endless):
    def __init__(self, context):
        super().__init__(context)
        if context.distributed.rank == 0:
            context._core.checkpoint._storage_manager.__class__ = Slow
"""
CONFIG = EXPERIMENT.replace(
    "checkpoint_policy: none", "checkpoint_policy: none, checkpoint_period: {{batches: 9}}"
)


class Training:
    """A rank on each of two machines, started as somebody else's launcher does, with a run directory on shared storage.

    Args:
        machines: The two.
        trial: Of :data:`TRIAL`, :data:`STUCK` or :data:`UPLOADS`.
        det_ds: Whether each is ``det-ds run``, instead of what a cluster starts.
    """

    def __init__(self, machines: tuple[Machine, Machine], trial: str, *, det_ds: bool = False) -> None:
        folder, port = machines[0].shared, str(free_port())
        self._run_dir = folder / "run"
        self._run_dir.mkdir()
        config = (folder if det_ds else self._run_dir) / "experiment.yaml"
        config.write_text(CONFIG.format(trial=trial, slots=2, batch=8))
        (folder / "trial.py").write_text(TRIAL + STUCK + UPLOADS)
        self._outputs = [folder / f"{machine.name}.txt" for machine in machines]
        train = [sys.executable, "-m", "determined_ds.train", f"trial:{trial}"]
        by_variable = {HANG_TIMEOUT: str(TIMEOUT_S / 60)}
        if det_ds:
            train = [sys.executable, "-m", "determined_ds.cli", "run", str(config), str(folder)]
            train += ["--hang-timeout", by_variable.pop(HANG_TIMEOUT)]
        self._ranks = [
            machine.start(
                [*train, "--run-dir", self._run_dir, "--accelerator", "cpu"],
                cwd=folder,
                env={**environment_of_rank(rank, machines[0], port), **by_variable},
                output=self._outputs[rank],
            )
            for rank, machine in enumerate(machines)
        ]

    @property
    def status(self) -> str:
        """As ``result.json`` has it."""
        return str(json.loads((self._run_dir / "result.json").read_text())["status"])

    def said(self, rank: int) -> str:
        return self._outputs[rank].read_text()

    def goes_on(self) -> None:
        """Wait until batches are trained from now on."""
        metrics = self._run_dir / "metrics.jsonl"
        size = metrics.stat().st_size if metrics.exists() else 0
        until(lambda: self._all_live() and metrics.exists() and metrics.stat().st_size > size + 1000)

    def has_uploaded(self) -> None:
        """Wait until a checkpoint is in storage."""
        until(lambda: self._all_live() and "uploaded" in self.said(0))

    def _all_live(self) -> bool:
        assert not any(rank.poll() for rank in self._ranks), self.said(0) + self.said(1)
        return True

    def code(self, rank: int) -> int:
        """Wait for the end of a rank."""
        return self._ranks[rank].wait(TOO_LONG_S)


def test_an_upload_takes_as_long_as_it_takes_and_a_cut_cable_is_told_on_both_machines(
    machines: tuple[Machine, Machine],
) -> None:
    training = Training(machines, "Uploads")
    training.has_uploaded()
    training.goes_on()
    machines[0].cut()
    assert [training.code(0), training.code(1)] == [EXIT_CRASHED, EXIT_CRASHED]
    gone = "for 4 s: dead, stopped or cut off"
    assert f"no sign of life from rank 1 (machine1) {gone}\n" in training.said(0)
    assert f"no sign of life from rank 0 (machine0) {gone}; ranks hear of one another" in training.said(1)
    assert "Traceback" not in training.said(0) + training.said(1)


@pytest.mark.long("two machines once more; the test of a cut cable has two, test_hang a rank that hangs")
def test_a_rank_that_hangs_is_named_with_its_stack(machines: tuple[Machine, Machine]) -> None:
    """And under ``det-ds run``, as here, ``result.json`` says how it ended."""
    training = Training(machines, "Stuck", det_ds=True)
    assert [training.code(0), training.code(1)] == [EXIT_CRASHED, EXIT_CRASHED]
    for rank in (0, 1):
        assert "rank 1 (machine1) hangs: nothing has moved for 4 s, since batch 2\n" in training.said(rank)
    assert "in fall_asleep" in training.said(1)
    assert "stands here" not in training.said(0)
    assert training.status == "failed"


@pytest.mark.long("two machines once more; the test of a cut cable has two, test_hang a rank that hangs")
def test_a_machine_that_dies_is_named(machines: tuple[Machine, Machine]) -> None:
    """Its connections are closed, which the other one hears of at once, as an error of gloo's."""
    training = Training(machines, "Endless")
    training.goes_on()
    machines[1].die()
    assert training.code(0) not in (0, None)
    assert "no sign of life from rank 1 (machine1): dead, stopped or cut off" in training.said(0)


# ------------------------------------------------------------------------------------------- process groups


def timeouts(environment: dict[str, str]) -> list[float]:
    """Seconds that ranks wait for one another: in the group of all, in one of DeepSpeed's, and in that of objects."""
    os.environ.update(environment)
    import deepspeed.comm
    import torch

    distributed = join_process_group(CPU)
    groups = [torch.distributed.group.WORLD, deepspeed.comm.new_group([0, 1]), distributed._group]
    return [group._get_backend(torch.device("cpu")).options._timeout.total_seconds() for group in groups]


def test_every_process_group_is_as_patient_as_an_upload_may_be_long(two_ranks: Ranks) -> None:
    hours = 3600.0
    assert two_ranks.run(timeouts, {}) == [[6 * hours] * 3] * 2
    assert two_ranks.run(timeouts, {HANG_TIMEOUT: "0"}) == [[7 * 24 * hours] * 3] * 2


@pytest.mark.parametrize(("stated", "seconds"), [("", 600), ("0.05", 3), ("0", 0)])
def test_the_hang_timeout_is_in_minutes(stated: str, seconds: float) -> None:
    assert hang_timeout_s({HANG_TIMEOUT: stated}) == pytest.approx(seconds)


@pytest.mark.parametrize("stated", ["soon", "-1", "nan", "inf"])
def test_a_hang_timeout_that_is_no_time_is_an_error(stated: str) -> None:
    with pytest.raises(ConfigError, match=f"{HANG_TIMEOUT} = .* must be a number of minutes"):
        hang_timeout_s({HANG_TIMEOUT: stated})
