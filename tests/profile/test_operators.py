"""The operators that cost most, their modules and phases."""

from __future__ import annotations

from determined_ds.profile.nesting import operators_of
from determined_ds.profile.operators import OperatorCosts, alike, operator_costs
from determined_ds.profile.trace_file import Trace
from determined_ds.protocol.profile_files import BACKWARD, FORWARD, MODULE, OPTIMIZER
from tests.profile.made import Made


def costs_of(trace: Trace, most: int = 10) -> OperatorCosts:
    """What its operators cost."""
    return operator_costs(trace, operators_of(trace), most)


NODE = "autograd::engine::evaluate_function: "


def test_cost_is_without_the_operators_that_are_called() -> None:
    made = Made().step(0, 100).op("aten::linear", 0, 50).op("aten::addmm", 10, 40)
    costs = {each.name: each.seconds for each in costs_of(made.trace).costliest}
    assert costs == {"aten::addmm": 0.03, "aten::linear": 0.02}


def test_alike_modules_are_one_row_with_the_costliest_of_them() -> None:
    made = Made().step(0, 100)
    made.mark(f"{MODULE}h.0.mlp", 0, 10).op("aten::addmm", 1, 9)
    made.mark(f"{MODULE}h.1.mlp", 20, 50).op("aten::addmm", 21, 49)
    [found] = costs_of(made.trace).costliest
    assert (found.module, found.num_modules, found.costliest) == ("h.*.mlp", 2, "h.1.mlp")
    assert (found.phase, found.calls, round(found.share, 3)) == ("forward", 2, 0.36)


def test_backward_operators_belong_to_the_module_of_their_forward_operator() -> None:
    made = Made().step(0, 100).mark(FORWARD, 0, 40).mark(BACKWARD, 50, 90)
    made.mark(f"{MODULE}first", 0, 10).op("aten::mm", 1, 9, number=7)
    made.mark(f"{MODULE}second", 20, 30).op("aten::mm", 21, 24, number=8)
    made.op(f"{NODE}MmBackward0", 50, 60, number=8).op("aten::mm", 51, 59)
    made.op(f"{NODE}MmBackward0", 60, 90, number=7).op("aten::mm", 61, 89)
    found = {(each.phase, each.module): each.seconds for each in costs_of(made.trace, 4).costliest}
    assert found["backward", "first"] == 0.028
    assert found["forward", "first"] == found["backward", "second"] == 0.008


def test_a_number_is_that_of_the_latest_step() -> None:
    """Operators after a forward pass have the number of the next one's first operator."""
    made = Made().step(0, 20).step(20, 40)
    made.op("aten::item", 10, 11, number=5)
    made.mark(f"{MODULE}first", 20, 25).op("aten::mm", 21, 24, number=5)
    made.op(f"{NODE}MmBackward0", 30, 35, number=5)
    found = {each.name: each.module for each in costs_of(made.trace).costliest}
    assert found[f"{NODE}MmBackward0"] == "first"


def test_a_module_in_the_backward_pass_is_recomputed() -> None:
    made = Made().step(0, 100).mark(BACKWARD, 50, 90)
    made.op(f"{NODE}CheckpointFunctionBackward", 50, 90)
    made.mark(f"{MODULE}block", 50, 70).op("aten::mm", 50, 70)
    made.mark(OPTIMIZER, 90, 100).op("aten::add_", 90, 95)
    seconds = costs_of(made.trace).seconds_by_phase
    assert (seconds["recomputed"], seconds["backward"], seconds["optimizer"]) == (0.02, 0.02, 0.005)


def test_seconds_and_calls_are_of_a_mean_step_and_what_is_outside_does_not_count() -> None:
    made = Made().op("aten::mm", 0, 9).step(10, 20).step(20, 30)
    made.op("aten::mm", 10, 14).op("aten::mm", 21, 25).op("aten::mm", 35, 39)
    [found] = costs_of(made.trace).costliest
    assert (found.seconds, found.calls, found.share) == (0.004, 1.0, 0.4)


def test_shapes_are_those_that_take_most_of_the_time() -> None:
    made = Made().step(0, 100).shaped("aten::mm", 0, 5, [2, 3], [3, 4]).shaped("aten::mm", 10, 90, [20, 30])
    [found] = costs_of(made.trace).costliest
    assert found.shapes == "[20, 30]"


def test_numbers_within_names_are_kept() -> None:
    assert alike("transformer.h.12.ln_1") == "transformer.h.*.ln_1"
    assert alike("3") == "*"
    assert alike("layer1.0.conv2") == "layer1.*.conv2"
