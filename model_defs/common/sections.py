"""Sections of the experiment YAML as typed objects: one parser, which reports every wrong key at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, DataError, Problem

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of a section: each key is a field with a default, and bounds where it has some."""

    model_config = ConfigDict(frozen=True, strict=True)


def parse_section(
    kind: type[S], given: Mapping[str, Any] | None, *, section: str = "data", closed: bool = True
) -> S:
    """Check keys and values, before any file is read.

    Args:
        kind: The section's fields.
        given: What the experiment YAML has there.
        section: Its name in the YAML.
        closed: Whether unknown keys are errors; ``hyperparameters`` also holds keys of the library.

    Raises:
        ConfigError: Everything that is wrong.
    """
    fields, given = kind.model_fields, {} if given is None else given
    if not isinstance(given, Mapping):
        fix = f"{section}: {{{next(iter(fields))}: ...}}"
        raise config_error(section, given, "must be a mapping of keys to values.", fix)
    problems = [
        Problem(key=f"{section}.{name}", value=given[name], message="no such key.", fix=one_of(fields, name))
        for name in given
        if closed and name not in fields
    ]
    found = None
    try:
        found = kind(**{name: given[name] for name in fields if name in given})
    except ValidationError as error:
        wrong = {each["loc"][0]: each["msg"] for each in reversed(error.errors())}
        for name in (name for name in fields if name in wrong):
            default = fields[name].default
            fix = f"{section}.{name}: {'null' if default is None else str(default).lower()}"
            message = wrong[name].replace("Input should be", "must be")
            problems.append(Problem(key=f"{section}.{name}", value=given[name], message=message, fix=fix))
    if found is None or problems:
        raise ConfigError(problems)
    return found


def config_error(key: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of one key."""
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix))


def data_error(key: str, value: Any, message: str, fix: str) -> DataError:
    """The error of one key that names data."""
    return DataError(Problem(key=key, value=value, message=message, fix=fix))
