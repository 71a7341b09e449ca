"""Memory over a step, and what holds it."""

from __future__ import annotations

from determined_ds.profile.memory_of_step import MemoryOfStep, memory_of_step
from determined_ds.profile.nesting import operators_of
from determined_ds.profile.trace_file import Trace
from determined_ds.protocol.profile_files import BACKWARD, DATA, FORWARD, HELD_LOOK, MODULE
from tests.profile.made import Made


def memory_in(trace: Trace) -> MemoryOfStep | None:
    """The memory of its last step."""
    return memory_of_step(trace, operators_of(trace))


NODE = "autograd::engine::evaluate_function: "


def a_step() -> Made:
    """A step with a forward pass of a module until 40, and its backward pass from 50 to 90."""
    made = Made().mark(f"{HELD_LOOK}0", -2, -1).step(0, 100)
    made.mark(FORWARD, 10, 40).mark(f"{MODULE}h.3.mlp", 10, 40).op("aten::mm", 10, 40, number=1)
    made.mark(BACKWARD, 50, 90).op(f"{NODE}MmBackward0", 50, 90, number=1)
    made.held = [{"parameters": [[1, 1000]], "optimizer_states": [[2, 2000]]}]
    return made


def test_what_lives_until_the_backward_pass_is_an_activation() -> None:
    made = a_step().memory(20, 500, address=10).memory(60, -500, address=10)
    made.memory(21, 300, address=11).memory(22, -300, address=11)
    found = memory_in(made.trace)
    assert found is not None
    assert found.peak_bytes_by_owner["activations"] == 500
    assert found.peak_bytes_by_owner["temporary"] == 300
    assert found.peak_bytes == 3800
    assert found.peak_at_s == 0.021
    assert (found.peak_phase, found.peak_module) == ("forward", "h.3.mlp")
    assert found.peak_modules == {"activations h.*.mlp": 500, "temporary h.*.mlp": 300}
    assert found.owner == "optimizer_states"


def test_what_the_backward_pass_hands_on_is_temporary_and_knows_its_module() -> None:
    made = a_step().memory(60, 5000, address=10).memory(61, -5000, address=10)
    found = memory_in(made.trace)
    assert found is not None
    assert found.owner == "temporary"
    assert found.peak_modules == {"temporary h.*.mlp": 5000}


def test_a_look_names_what_was_allocated_before_it() -> None:
    made = a_step().memory(60, 700, address=10).mark(f"{HELD_LOOK}1", 95, 96)
    made.memory(97, -700, address=10).memory(98, 700, address=10)  # the address is used again
    made.held = [*made.held, {"gradients": [[10, 700]]}]
    found = memory_in(made.trace)
    assert found is not None
    assert found.bytes_by_owner["gradients"][-1] == 0
    assert found.peak_bytes_by_owner["gradients"] == 700


def test_batches_and_collectives_hold_their_own() -> None:
    made = a_step().mark(DATA, 0, 5).op("aten::stack", 1, 4).memory(2, 64, address=10)
    made.op("c10d::allreduce_", 91, 95).memory(92, 128, address=11)
    found = memory_in(made.trace)
    assert found is not None
    assert (found.peak_bytes_by_owner["data"], found.peak_bytes_by_owner["communication"]) == (64, 128)


def test_a_loss_outside_of_the_engine_is_kept_for_the_backward_pass() -> None:
    made = a_step().op("aten::cross_entropy_loss", 41, 45).memory(42, 64, address=10)
    found = memory_in(made.memory(70, -64, address=10).trace)
    assert found is not None
    assert found.peak_bytes_by_owner["activations"] == 64


def test_released_memory_of_before_is_not_held() -> None:
    found = memory_in(a_step().memory(30, -1000, address=1).memory(40, 10, address=5).trace)
    assert found is not None
    assert found.bytes_by_owner["parameters"][0] == 1000
    assert found.bytes_by_owner["parameters"][-1] == 0


def test_without_allocations_nothing_is_known() -> None:
    assert memory_in(Made().step(0, 10).trace) is None
