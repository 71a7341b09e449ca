"""A document -> all that the master would refuse in it, as problems in the order of the file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from packaging.version import Version

from determined_ds.documents.document import Document, KeyPath
from determined_ds.errors import NOT_GIVEN, Problem
from determined_ds.experiment.additions import ADDITIONS, OLDEST, OPTION
from determined_ds.experiment.schema.judge import Fault, faults
from determined_ds.experiment.schema.of_master import STORAGES, keys_of, schema
from determined_ds.experiment.schema.words import Words, worded

MAX_PROBLEMS = 20


def problems(document: Document, version: str = OLDEST) -> list[Problem]:
    """All that a master of a version would refuse, at most ``MAX_PROBLEMS``; the last then counts the rest."""
    try:
        refused = _refused(document.data)
    except RecursionError:  # beyond what a reader lets pass
        return [document.problem((), "is nested too deep to be judged", "write it more plainly", "invalid")]
    order = sorted(refused, key=lambda path: _line(document, path))
    # A file may have thousands of unknown keys. Each costs a search for the nearest, so that few are worded.
    found: dict[KeyPath, Words] = {}
    for path in order[:MAX_PROBLEMS]:
        found[path] = worded(refused[path])
    found |= _too_new(document, version)
    if len(order) <= MAX_PROBLEMS:
        for path, words in _between_sections(document.data):
            if not _is_below(path, found):
                found[path] = words
    return _limited(document, _without_echoes(document, found), num_all=max(len(order), len(found)))


def _refused(config: dict[str, Any]) -> dict[KeyPath, Fault]:
    """The fault of each place: the last is the most exact, but for a key that is not known at all."""
    storage = _typed(config.get("checkpoint_storage"))
    found: dict[KeyPath, Fault] = {}
    for fault in faults(schema("experiment"), {**config, "checkpoint_storage": storage}):
        if fault.path not in found or found[fault.path].keyword != "unknown" or fault.keyword == "unknown":
            found[fault.path] = fault
    searcher, hyperparameters = config.get("searcher"), config.get("hyperparameters")
    if isinstance(searcher, dict) and searcher.get("name") == "grid" and isinstance(hyperparameters, dict):
        for key, value in hyperparameters.items():
            for fault in faults(schema("check-grid-hyperparameter"), value, ("hyperparameters", key)):
                if not _is_below(fault.path, found):
                    found[fault.path] = fault
    return found


def _typed(storage: Any) -> Any:
    """A storage with a type: where it has none, the one that fits; nulls then stand for the cluster's values."""
    if not isinstance(storage, dict) or "type" in storage:
        return storage
    known = keys_of("checkpoint-storage")
    given = {key: value for key, value in storage.items() if value is not None or key not in known}
    fits = max(STORAGES, key=lambda kind: len(given.keys() & keys_of(kind)))
    return {**given, "type": fits}


def _is_below(path: KeyPath, found: Mapping[KeyPath, Any]) -> bool:
    """Whether there is something at ``path``, or at what it is in."""
    return any(path[:end] in found for end in range(len(path) + 1))


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


def _too_new(document: Document, version: str) -> dict[KeyPath, Words]:
    """The keys that this master does not know yet; it refuses them whatever their value, null and false included."""
    found: dict[KeyPath, Words] = {}
    for row in ADDITIONS:
        path: KeyPath = tuple(row.key.split("."))
        if document.get(path, NOT_GIVEN) is not NOT_GIVEN and Version(version) < Version(row.since):
            message = f"needs Determined {row.since} or newer, and this is checked for {version}"
            fix = f"remove it, or check with {OPTION} {row.since} where the master is that new"
            found[path] = Words(code="determined-version", message=message, fix=fix)
    return found


# --- Between sections ---------------------------------------------------------------------------------------


def _between_sections(config: dict[str, Any]) -> Iterator[tuple[KeyPath, Words]]:
    yield from _workspace_and_project(config)
    yield from _repeated_policies(config.get("log_policies"))
    yield from _azure_credentials(config.get("checkpoint_storage"))


def _azure_credentials(storage: Any) -> Iterator[tuple[KeyPath, Words]]:
    """They come from one place; the schema's check of it spans the cluster's own storage."""
    if isinstance(storage, dict) and storage.get("connection_string") is not None:
        others = [key for key in ("account_url", "credential") if storage.get(key) is not None]
        if others:
            message = f"is given beside {' and '.join(others)}, and one of them is to be used"
            fix = "keep connection_string, or account_url with credential"
            path = ("checkpoint_storage", "connection_string")
            yield path, Words(code="invalid", message=message, fix=fix)


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
