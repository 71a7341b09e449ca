"""Of a test with many costly cases, those that ``make test`` runs; its other cases are long.

Chosen so that every value of every parameter that changes the code path stands in one of them. A case that is added
to a test is long until it is named here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import pytest

# Test -> regular expressions of the ids of its short cases.
SHORT_CASES: dict[str, tuple[str, ...]] = {
    "cluster/test_follow.py::test_what_no_restart_can_help_is_started_once_and_says_why": ("configuration",),
    "experiments/test_templates.py::test_it_runs": (
        ".*/const.yaml",
        ".*/(search|pipeline|zero3).yaml",
    ),
    "checkpoints/test_import.py::test_every_strategy_starts_from_them": (
        "zero3-bf16",
        "pipeline",
        "partitions",
    ),
    "checkpoints/test_export_to_hugging_face.py::test_from_pretrained_computes_what_the_engine_did": (
        "gpt2-zero3-bf16",
        "gpt2-pipeline",
        "vit.*",
    ),
    "memory/test_measured.py::test_model_states_are_within_ten_percent": (
        "[02]-fp32-given[02]",
        "[13]-bf16-given[57]",
        "1-bf16-given8",
    ),
    "memory/test_measured.py::test_offloaded_states_are_on_the_host": ("2-False-2", "3-True-1"),
    "model_defs/test_sizes.py::test_a_template_of_full_size_builds_the_published_model": (
        "vit/zero3_.* model_size=base",
        "gpt2/zero3_xl model_size=small",
        "causal_lm/zero3_full ",
    ),
    "checkpoints/test_changed_settings.py::test_new_settings_are_those_of_the_next_step": (
        "no scheduler-[02]",
        "WarmupLR-[13]",
    ),
    "checkpoints/test_changed_settings.py::test_a_schedule_goes_on_by_its_new_settings": (".*-[01]",),
    "checkpoints/test_warm_start.py::test_it_is_a_new_training_that_begins_with_the_weights": (
        "pipeline",
        "zero1",
        "zero3-two-engines",
    ),
    "session/test_ported_scripts.py::test_the_port_is_run_and_resumed": ("cifar10",),
    "trial/test_tensor_parallel.py::test_losses_are_those_of_plain_pytorch": (
        "llama, ZeRO [13]",
        "llama, ZeRO 1, two replicas",
        "GPT-2 by nn.Linear",
    ),
    "trial/test_strategies_agree.py::test_losses_and_norms_are_those_of_plain_pytorch": (
        "one rank, micro-batch 1",
        "ddp",
        "ZeRO [23], accumulation 2",
        "pipeline, ZeRO 1",
        "sequence 2, ZeRO [03]",
    ),
}
LONG_CASE = pytest.mark.long("one more case of a test that has short ones: tests/short_cases.py")


def _cases(items: Iterable[pytest.Item]) -> Iterator[tuple[pytest.Item, str, str]]:
    """Each item with the name of its test and of its case."""
    for item in items:
        test, _, case = item.nodeid.removeprefix("tests/").partition("[")
        yield item, test, case.removesuffix("]")


def mark_long_cases(items: Iterable[pytest.Item]) -> None:
    """Give the mark ``long`` to the cases that are not short."""
    for item, test, case in _cases(items):
        if test in SHORT_CASES and not any(re.fullmatch(short, case) for short in SHORT_CASES[test]):
            item.add_marker(LONG_CASE)


def unknown(items: Iterable[pytest.Item]) -> list[str]:
    """The tests and cases above that are not among all tests: they have another name by now."""
    found: dict[str, list[str]] = {}
    for _, test, case in _cases(items):
        found.setdefault(test, []).append(case)
    return [
        f"{test}[{pattern}]"
        for test, patterns in SHORT_CASES.items()
        for pattern in patterns
        if not any(re.fullmatch(pattern, case) for case in found.get(test, []))
    ]
