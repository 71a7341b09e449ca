"""A stop is seen by all ranks at the same step, at most one after the chief has it."""

from __future__ import annotations

import pytest

from tests.ranks import Ranks

STEPS = 5
REQUESTED_AT = 2


def answers(preempt_mode: str) -> tuple[list[bool], list[bool]]:
    """In a rank: the answers of each step of two trainings; the chief hears of the stop in the first one."""
    from types import SimpleNamespace

    import torch.distributed as dist
    from determined import core

    from determined_ds.devices import detect_accelerator
    from determined_ds.protocol.signals import STOP
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.runtime.local_core import SignalPreemptContext
    from determined_ds.transformers.stop_question import StopQuestion

    distributed = join_process_group(detect_accelerator("cpu"))
    mode = core.PreemptMode(preempt_mode)
    with SignalPreemptContext(distributed, mode) as preempt:
        question = StopQuestion(SimpleNamespace(preempt=preempt, distributed=distributed))
        first = []
        for step in range(STEPS):
            if step == REQUESTED_AT and dist.get_rank() == 0:
                STOP.set()
            first.append(question.ask())
            distributed.allgather(step)  # what a step sends beside it
        STOP.clear()
        question.forget()
        second = [question.ask() for _ in range(2)]
        question.forget()
        assert preempt._preempt_mode is mode
    return first, second


@pytest.mark.parametrize("preempt_mode", ["WORKERS_ASK_CHIEF", "CHIEF_ONLY"])
def test_all_ranks_stop_one_step_after_the_chief_has_it(preempt_mode: str, two_ranks: Ranks) -> None:
    first = [step > REQUESTED_AT for step in range(STEPS)]
    assert two_ranks.run(answers, preempt_mode) == [(first, [False, False])] * 2
