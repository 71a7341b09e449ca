"""The compatibility table: each rule by a configuration that breaks it, and a neighbour that does not."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest

from determined_ds.config.deepspeed.normalized import TORCH_TYPES
from determined_ds.config.facts import ZERO_OPTIMIZERS
from determined_ds.config.rules import RULES, Rule
from determined_ds.documents.document import dotted
from determined_ds.errors import ConfigError, Problem
from tests.config.rule_cases import (
    communication,
    degrees,
    execution,
    experts,
    optimizers,
    precision,
    sequences,
    shared_layers,
)
from tests.config.rule_cases import zero as zero_cases
from tests.config.rule_cases.points import CONTIGUOUS, CPU_OFFLOAD, FP16, SGD, Cases, Setup, zero
from tests.making import CPU, decide
from tests.ranks import Ranks

SUBJECTS = (
    degrees,
    sequences,
    shared_layers,
    experts,
    zero_cases,
    precision,
    communication,
    optimizers,
    execution,
)
CASES: Cases = {key: case for subject in SUBJECTS for key, case in subject.CASES.items()}


def told(setup: Setup) -> tuple[list[Problem], list[Problem]]:
    """Problems and warnings."""
    hp = {
        "global_batch_size": 24,
        "pipe_parallel_size": setup.pipe,
        "model_parallel_size": setup.model,
        "sequence_parallel_size": setup.sequence,
        **setup.hyperparameters,
    }
    try:
        resolved = decide(
            hp, setup.ds, slots=setup.slots, accelerator=setup.accelerator, machines=setup.machines
        )
    except ConfigError as error:
        return list(error.problems), []
    return [], list(resolved.warnings)


def by_code(problems: list[Problem], rule: Rule) -> list[Problem]:
    return [found for found in problems if (found.code, found.key) == (rule.code, dotted(rule.key))]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}:{dotted(rule.key)}")
class TestEachRule:
    def test_is_broken(self, rule: Rule) -> None:
        broken, _ = CASES[rule.code, rule.key]
        problems, warnings = told(broken)
        (found,) = by_code(warnings if rule.warning else problems, rule)
        assert found.fix
        assert not re.search(r"[{}]", found.message)
        assert bool(problems) != rule.warning

    def test_is_kept_by_the_neighbour(self, rule: Rule) -> None:
        problems, warnings = told(CASES[rule.code, rule.key][1])
        assert problems == []
        assert by_code(warnings, rule) == []

    def test_has_a_reason_a_fix_and_a_source(self, rule: Rule) -> None:
        assert rule.message
        assert rule.fix
        assert rule.source

    def test_names_a_source_that_there_is(self, rule: Rule) -> None:
        """A file of the installed DeepSpeed, and a symbol in it, where the source is DeepSpeed."""
        named = re.match(r"deepspeed [\d.]+ ([\w/]+\.py)(?: ([\w.]+))?", rule.source)
        assert named or "deepspeed" not in rule.source
        if named:
            package = importlib.util.find_spec("deepspeed")
            assert package is not None
            assert package.origin is not None
            text = (Path(package.origin).parent / named.group(1)).read_text()
            for symbol in (named.group(2) or "").split("."):
                assert symbol in text


def test_every_case_is_of_a_rule() -> None:
    assert set(CASES) == {(rule.code, rule.key) for rule in RULES}


def test_every_broken_rule_is_told_at_once() -> None:
    ds = {**FP16, **zero(2, offload_param=CPU_OFFLOAD, zero_hpz_partition_size=2)}
    problems, _ = told(Setup(ds=ds, pipe=2, accelerator=CPU))
    assert {found.code for found in problems} == {
        "pipeline-zero-stage",
        "offload-param-stage",
        "fp16-unsupported",
        "zeropp-hpz-stage",
    }


def test_a_warning_stops_nothing() -> None:
    problems, warnings = told(Setup(ds={"gradient_accumulation_steps": 1}, pipe=2))
    assert problems == []
    assert [warning.code for warning in warnings] == ["pipeline-bubble"]
    assert str(warnings[0]) == (
        "gradient_accumulation_steps = 1 (ds.json): 1 micro-batches for 2 pipeline stages: by 1f1b a stage waits"
        " 50 % of the time\n  fix: use at least 2 micro-batches (4 x 2 leave a bubble of 11 %)"
    )


# ---------------------------------------------------------------------------------------- what DeepSpeed says of them


def configure_checkpoints(section: dict[str, Any]) -> str:
    import deepspeed

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    config = {"train_batch_size": 1, "activation_checkpointing": section}
    try:
        deepspeed.checkpointing.configure(None, config)
    except AssertionError as error:
        return str(error)
    finally:
        deepspeed.checkpointing._configure_defaults()
    return ""


@pytest.mark.parametrize(
    ("lacking", "says"),
    [
        ("number_checkpoints", "number of layers"),
        ("partition_activations", "partitioned activations"),
        ("", ""),
    ],
)
def test_contiguous_checkpoints_fail_in_deepspeed_on_what_the_rule_asks_for(
    one_rank: Ranks, lacking: str, says: str
) -> None:
    section = {**CONTIGUOUS, "number_checkpoints": 2, "partition_activations": True}
    section.pop(lacking, None)
    (said,) = one_rank.run(configure_checkpoints, section)
    assert says in said
    assert bool(said) == bool(lacking)
    problems, _ = told(Setup(ds={"activation_checkpointing": section}))
    assert [problem.code for problem in problems] == (["contiguous-checkpoints"] if lacking else [])


def test_the_optimizers_of_zero_are_deepspeeds_own() -> None:
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    for name in TORCH_TYPES["optimizer"] - {"Muon"}:  # which DeepSpeed takes for its own
        taken = getattr(torch.optim, name) in ZERO_SUPPORTED_OPTIMIZERS
        assert taken == (name.lower() in ZERO_OPTIMIZERS), name


def train_with_sgd(ds_config: dict[str, Any]) -> str:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    model = torch.nn.Linear(2, 1)
    try:
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds_config)
    except AssertionError as error:
        return str(error)
    return ""


def test_an_optimizer_that_zero_refuses_is_refused_before(one_rank: Ranks) -> None:
    allowed = decide(
        {"global_batch_size": 2}, {**zero(1), **SGD, "zero_allow_untested_optimizer": True}, slots=1
    )
    assert one_rank.run(train_with_sgd, allowed.ds_config) == [""]
    refused = {key: value for key, value in allowed.ds_config.items() if "untested" not in key}
    (said,) = one_rank.run(train_with_sgd, refused)
    assert "untested ZeRO Optimizer" in said
    problems, _ = told(Setup(ds={**zero(1), **SGD}))
    assert [problem.code for problem in problems] == ["zero-untested-optimizer"]
