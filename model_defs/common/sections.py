"""Sections of the experiment YAML as typed objects: one parser, which reports every wrong key at once."""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, DataError, Problem

S = TypeVar("S", bound="Section")


class Section(BaseModel):
    """Base of a section: each key is a field with a default, and bounds where it has some.

    With ``extra="forbid"`` an unknown key is an error; ``hyperparameters`` also holds keys of the library.
    """

    model_config = ConfigDict(frozen=True, strict=True)


def parse_section(kind: type[S], given: Any, *, section: str = "hyperparameters") -> S:
    """Check keys and values, before any file is read.

    Args:
        kind: The section's fields.
        given: What the experiment YAML has there; None: nothing.
        section: Its name in the YAML.

    Raises:
        ConfigError: Everything that is wrong.
    """
    try:
        return kind.model_validate({} if given is None else given)
    except ValidationError as error:
        problems: dict[str, Problem] = {}
        for wrong in reversed(error.errors()):  # of several alternatives, the first is what is said
            name = str(wrong["loc"][0]) if wrong["loc"] else ""
            key = f"{section}.{name}" if name else section
            message = wrong["msg"].replace("Input should be", "must be")
            if field := kind.model_fields.get(name):
                fix = f"{key}: {'null' if field.default is None else str(field.default).lower()}"
            else:
                message, fix = ("no such key." if name else message), one_of(kind.model_fields, name)
            problems[key] = Problem(key=key, value=wrong["input"], message=message, fix=fix)
        raise ConfigError(reversed(problems.values())) from None


def config_error(key: str, value: Any, message: str, fix: str) -> ConfigError:
    """The error of one key."""
    return ConfigError(Problem(key=key, value=value, message=message, fix=fix))


def data_error(key: str, value: Any, message: str, fix: str) -> DataError:
    """The error of one key that names data."""
    return DataError(Problem(key=key, value=value, message=message, fix=fix))
