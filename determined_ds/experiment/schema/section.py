"""What the models are made of: values as strict as the master takes them, unions, and the base of all sections.

JSON knows one kind of number, so 1.0 is an integer to the master too; true is not. A null counts as absent
wherever a field may be absent. Source: JSON Schema draft 7, and the schemas ``expconf/v0`` of determined 0.38.1.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Strict
from pydantic_core import PydanticCustomError


def fault(code: str, message: str, fix: str) -> PydanticCustomError:
    """What a validator raises: the words of a :class:`~determined_ds.errors.Problem`."""
    return PydanticCustomError(code, "{message}", {"message": message, "fix": fix})


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


Text = Annotated[str, Strict()]
Flag = Annotated[bool, Strict()]
Number = Annotated[float, Strict()]
Integer = Annotated[int, Strict(), BeforeValidator(_whole)]
Natural = Annotated[int, Strict(), Field(ge=0), BeforeValidator(_whole)]
Positive = Annotated[int, Strict(), Field(ge=1), BeforeValidator(_whole)]


class Section(BaseModel):
    """A mapping whose keys are known."""

    model_config = ConfigDict(extra="forbid", frozen=True, defer_build=True)


def by_value(key: str, *known: str, otherwise: str) -> Discriminator:
    """Decides a union by the value of one key, which is the member's tag; else by ``otherwise``."""

    def tag(value: Any) -> str:
        kind = value.get(key) if isinstance(value, dict) else None
        return kind if isinstance(kind, str) and kind in known else otherwise

    return Discriminator(tag)


class _Words(dict[str, str | int | float]):
    """Words of an error that an annotation can hold: those are hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self.items()))


TAGS: dict[type, str] = {str: "text", int: "integer", float: "integer", list: "list", dict: "mapping"}


def by_kind(*tags: str, expected: str, fix: str) -> Discriminator:
    """Decides a union by the kind of the value: ``text``, ``integer``, ``list`` or ``mapping``."""

    def tag(value: Any) -> str | None:
        kind = TAGS.get(type(value))
        return kind if kind in tags else None

    return Discriminator(
        tag,
        custom_error_type="wrong-kind",
        custom_error_message=f"must be {expected}",
        custom_error_context=_Words(expected=expected, fix=fix),
    )
