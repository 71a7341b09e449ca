"""A document -> all that the master would refuse in it, as problems in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import Problem
from determined_ds.experiment.additions import OLDEST, Addition, split_additions
from determined_ds.experiment.schema.locate import locate
from determined_ds.experiment.schema.parameters import uncounted
from determined_ds.experiment.schema.root import ExperimentConfig
from determined_ds.experiment.schema.words import Words, worded

MAX_PROBLEMS = 20


def problems(document: Document, version: str = OLDEST) -> list[Problem]:
    """All that a master of a version would refuse, at most ``MAX_PROBLEMS``; the last then counts the rest."""
    errors = []
    config, added = split_additions(document.data)
    try:
        ExperimentConfig.model_validate(config)
    except ValidationError as refused:
        errors = refused.errors(include_url=False)
    places = [locate(ExperimentConfig, error["loc"]) for error in errors]
    order = sorted(range(len(errors)), key=lambda index: _line(document, places[index].path))
    # A file may have thousands of unknown keys. Each costs a search for the nearest, so that few are worded.
    found = {places[index].path: worded(errors[index], places[index]) for index in order[:MAX_PROBLEMS]}
    if len(order) <= MAX_PROBLEMS:
        refused_at = frozenset(found)
        for path, words in (*_between_sections(config), *_added(added, version)):
            if not any(path[:end] in refused_at for end in range(len(path) + 1)):
                found[path] = words
    return _limited(document, _without_echoes(document, found), num_all=max(len(order), len(found)))


def _line(document: Document, path: KeyPath) -> tuple[int, int]:
    origin = document.origin(path)
    return origin.line, origin.column


def _without_echoes(document: Document, found: dict[KeyPath, Words]) -> dict[KeyPath, Words]:
    """A key that is misspelt is not missing too."""
    meant = {words.meant for words in found.values()} - {""}
    return {
        path: words
        for path, words in found.items()
        if words.code != "missing-key" or ".".join(map(str, path)) not in meant
    }


def _limited(document: Document, found: dict[KeyPath, Words], *, num_all: int) -> list[Problem]:
    paths = sorted(found, key=lambda path: _line(document, path))
    kept = paths if num_all <= MAX_PROBLEMS else paths[: MAX_PROBLEMS - 1]
    shown = [
        document.problem(path, words.message, words.fix, words.code)
        for path, words in ((path, found[path]) for path in kept)
    ]
    if num_all > MAX_PROBLEMS:
        fix = f"fix these first, and check that {document.name} is the intended file"
        shown.append(document.problem((), f"{num_all - len(shown)} more problems", fix, "more"))
    return shown


def _added(given: list[tuple[Addition, Any]], version: str) -> Iterator[tuple[KeyPath, Words]]:
    """What is wrong with the keys that came after 0.38.1."""
    for row, value in given:
        wrong = row.problem_with(value, version)
        if wrong is not None:
            code, message, fix = wrong
            yield row.path, Words(code=code, message=message, fix=fix)


# --- Between sections ---------------------------------------------------------------------------------------


def _between_sections(config: dict[str, Any]) -> Iterator[tuple[KeyPath, Words]]:
    yield from _workspace_and_project(config)
    yield from _repeated_policies(config.get("log_policies"))
    searcher = config.get("searcher")
    hyperparameters = config.get("hyperparameters")
    if isinstance(searcher, dict) and searcher.get("name") == "grid" and isinstance(hyperparameters, dict):
        for key, value in hyperparameters.items():
            for path in uncounted(value, ("hyperparameters", key)):
                message = "has no count, and a grid search needs one of every range"
                fix = "write count: N, the number of values to try"
                yield path, Words(code="hyperparameter-spec", message=message, fix=fix)


def _workspace_and_project(config: dict[str, Any]) -> Iterator[tuple[KeyPath, Words]]:
    """Refused by the master's code: one without the other. An empty name counts as none."""
    for key, other in (("project", "workspace"), ("workspace", "project")):
        if config.get(other) and not config.get(key):
            message = f"is given without {key}, and the two belong together"
            fix = f"write {key}: NAME too, or remove {other}"
            yield (other,), Words(code="missing-key", message=message, fix=fix)


def _repeated_policies(policies: Any) -> Iterator[tuple[KeyPath, Words]]:
    """Refused by the master's code: two log policies of one name."""
    first: dict[str, int] = {}
    for index, policy in enumerate(policies if isinstance(policies, list) else ()):
        name = policy.get("name") if isinstance(policy, dict) else None
        if isinstance(name, str) and first.setdefault(name, index) != index:
            message = f"names log policy {index}, and policy {first[name]} already"
            fix = "give it another name, or remove one of the two"
            yield ("log_policies", index, "name"), Words(code="duplicate-key", message=message, fix=fix)
