"""``fit.breakdown`` switches on DeepSpeed's instruments, where the JSON leaves them out or has them off."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.config.deepspeed.instruments import INSTRUMENTS
from determined_ds.documents.document import dotted
from tests.making import CUDA, decide, refusals

ON = "global_batch_size: 8\nfit: {breakdown: true}"
OFF: dict[str, Any] = {
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "comms_logger": {"enabled": False, "verbose": True},
}


@pytest.mark.parametrize("ds", [{}, OFF], ids=["absent", "false"])
def test_they_are_on_and_their_origin_is_the_switch(ds: dict[str, Any]) -> None:
    found = decide(ON, ds)
    assert found.switched_on == set(INSTRUMENTS)
    for path in INSTRUMENTS.values():
        assert found.ds.get(path) is True
        assert str(found.origins[dotted(path)]) == "fit.breakdown, hp.yaml:2"
    assert found.warnings == ()


def test_without_the_switch_they_are_as_the_json_has_them() -> None:
    found = decide("global_batch_size: 8\nfit: {breakdown: false}", {"wall_clock_breakdown": True})
    assert found.switched_on == frozenset()
    assert found.ds_config["wall_clock_breakdown"] is True
    assert not {"memory_breakdown", "comms_logger"} & found.ds_config.keys()


def test_what_the_json_switches_on_is_the_jsons() -> None:
    """DeepSpeed prints it; what memory_breakdown prints of GPUs resets their peaks, what is only read does not."""
    found = decide(ON, '{"comms_logger": {"enabled": true, "verbose": true}}', accelerator=CUDA)
    assert found.switched_on == {"memory_breakdown", "wall_clock_breakdown"}
    assert found.ds_config["comms_logger"] == {"enabled": True, "verbose": True}
    assert found.origins["comms_logger.enabled"] == "ds.json:1"
    assert found.warnings == ()
    printed = decide(ON, {"memory_breakdown": True}, accelerator=CUDA)
    assert [each.code for each in printed.warnings] == ["memory-breakdown-peak"]


@pytest.mark.parametrize("name", INSTRUMENTS)
def test_overwritten_with_false_beside_the_switch_is_a_contradiction(name: str) -> None:
    over = "{comms_logger: {enabled: false}}" if name == "comms_logger" else f"{{{name}: false}}"
    [problem] = refusals(lambda: decide(f"{ON}\noverwrite_deepspeed_args: {over}"))
    assert problem.key == "hyperparameters.fit.breakdown"
    assert name in problem.message
    assert "hp.yaml:3" in problem.message
