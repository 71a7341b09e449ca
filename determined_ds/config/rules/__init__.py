"""The compatibility table: what cannot run together, why, how to fix it, and where that is known from.

A row is a :class:`Rule`; the rows are in a file a subject. ``breaks`` sees the ``Facts`` after every "auto" is
filled, and says whether the rule is broken; ``message`` and ``fix`` may name any fact in braces.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from determined_ds.config.facts import Facts
from determined_ds.config.rules import (
    communication,
    degrees,
    execution,
    experts,
    optimizers,
    precision,
    sequences,
    shared_layers,
    zero,
)
from determined_ds.config.rules.rule import Rule
from determined_ds.errors import NOT_GIVEN, Problem

RULES: tuple[Rule, ...] = (
    *degrees.RULES,
    *sequences.RULES,
    *shared_layers.RULES,
    *experts.RULES,
    *zero.RULES,
    *precision.RULES,
    *communication.RULES,
    *optimizers.RULES,
    *execution.RULES,
)


def broken_rules(facts: Facts, *, slots_origin: str = "") -> Iterator[tuple[Rule, Problem]]:
    """Every rule of the table that the facts break, with its problem filled in."""
    for rule in RULES:
        if rule.breaks(facts):
            on_slots = rule.key == ("slots_per_trial",)
            of_trial = rule.key[0] == "hyperparameters"
            document, key = (facts.hyperparameters, rule.key[1:]) if of_trial else (facts.ds, rule.key)
            problem = Problem(
                key=document.key(key),
                value=facts.slots if on_slots else document.get(key, NOT_GIVEN),
                origin=slots_origin if on_slots else document.origin(key),
                message=rule.message.format_map(_ByName(facts)),
                fix=rule.fix.format_map(_ByName(facts)),
                code=rule.code,
            )
            yield rule, problem


class _ByName(dict[str, Any]):
    """The facts by their names, for ``str.format_map``."""

    def __init__(self, facts: Facts) -> None:
        super().__init__()
        self._facts = facts

    def __missing__(self, name: str) -> Any:
        return getattr(self._facts, name)
