"""Calls of the user's code that wait: which are marked, and what they are found to take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from determined_ds.profile.waiting_calls import waiting_calls_of
from determined_ds.protocol.profile_files import DATA, WAIT
from determined_ds.runtime.profiling.call_marks import marked_waiting_calls
from tests.profile.made import Made
from tests.ranks import Ranks

HERE = "tests/profile/test_waiting_calls.py"


def marked(function: Any) -> list[str]:
    """The marks of what a function calls, in their order, without equal ones."""
    with profile(activities=[ProfilerActivity.CPU]) as found, marked_waiting_calls():
        function()
    names = [event.name for event in found.events() if event.name.startswith(WAIT)]
    return list(dict.fromkeys(name.removeprefix(WAIT).partition(":")[0] for name in names))


def test_what_copies_a_tensor_to_the_host_is_marked_with_its_line() -> None:
    tensor = torch.ones(2)

    def calls() -> None:
        tensor[0].item()
        float(tensor[0])
        if tensor[0] > 0:
            tensor.tolist()

    assert marked(calls) == [f"{name} {HERE}" for name in ("item", "float", "bool", "tolist")]


def test_afterwards_tensors_are_as_before() -> None:
    before = set(vars(torch.Tensor))
    wait = dist.Work.wait
    marked(lambda: torch.ones(1).item())
    assert set(vars(torch.Tensor)) == before
    assert dist.Work.wait is wait


def collectives(folder: Path) -> list[str]:
    """In a rank: the marks of a user's collectives, and none of DeepSpeed's."""
    dist.init_process_group("gloo")
    import deepspeed
    import deepspeed.comm

    deepspeed.init_distributed("gloo", verbose=False)
    model = torch.nn.Linear(2, 2)
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 1},
        "optimizer": {"type": "Adam", "params": {"torch_adam": True}},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)

    def calls() -> None:
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        dist.all_reduce(torch.ones(1))
        deepspeed.comm.barrier()
        dist.all_reduce(torch.ones(1), async_op=True).wait()

    return marked(calls)


def test_collectives_of_the_user_are_marked_and_those_of_deepspeed_are_not(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    found = two_ranks.run(collectives, tmp_path)[0]
    assert found == [f"{name} {HERE}" for name in ("all_reduce", "barrier", "wait")]


def test_a_line_is_named_once_by_what_takes_longest() -> None:
    made = Made().step(0, 100).step(100, 200)
    made.mark(f"{WAIT}item trial.py:8", 1, 5).mark(f"{WAIT}bool trial.py:8", 6, 7)
    made.mark(f"{WAIT}item trial.py:8", 101, 104).mark(f"{WAIT}item trial.py:9", 105, 106)
    first, second = waiting_calls_of(made.trace)
    assert (first.function, first.place, first.calls, first.seconds) == ("item", "trial.py:8", 1, 0.004)
    assert (second.place, second.seconds) == ("trial.py:9", 0.0005)


def test_what_a_data_loader_does_and_what_is_outside_of_steps_is_left_out() -> None:
    made = Made().step(0, 100).mark(DATA, 0, 10)
    made.mark(f"{WAIT}item data.py:8", 1, 5).mark(f"{WAIT}item trial.py:8", 150, 155)
    assert waiting_calls_of(made.trace) == []
