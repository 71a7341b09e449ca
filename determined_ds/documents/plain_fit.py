"""Whether a value plainly fits a JSON Schema, without loading jsonschema.

jsonschema takes 50 ms to load, a fifth of a whole ``det-ds check``, and most of what is checked is right. What does not
plainly fit is judged by jsonschema, which alone says what is wrong.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from determined_ds.documents.document import words
from determined_ds.documents.text import is_of

BOUNDS: dict[str, Callable[[Any, Any], bool]] = {
    "minimum": operator.ge,
    "maximum": operator.le,
    "exclusiveMinimum": operator.gt,
    "exclusiveMaximum": operator.lt,
}
# They decide nothing by themselves: annotations, and what another keyword looks at.
SILENT = words("""$comment default defaultMessage description ignoreCase model then title unionKey
    deepspeed_version optimizer_params optimizer_types scheduler_params scheduler_types""")
Verdict = bool | None  # None: it takes a closer look


def fits_plainly(
    schema: Any, value: Any, *, named: Callable[[str], Any] | None = None, wildcard: str | None = None
) -> bool:
    """Whether a validator would find nothing; False also where that takes a closer look.

    Args:
        schema: Of draft 7, or with the keywords of Determined's schemas that are treated here.
        value: What is judged.
        named: A schema by its ``$ref``.
        wildcard: A text that is of every type and of every enum; None where there is none.
    """

    def fits(schema: Any, value: Any) -> Verdict:
        if isinstance(schema, bool):
            return schema
        return _every(_holds(keyword, schema, value) for keyword in schema if keyword not in SILENT)

    def _holds(keyword: str, schema: dict[str, Any], value: Any) -> Verdict:
        wanted, fields = schema[keyword], value if isinstance(value, dict) else {}
        if keyword in ("type", "enum", "const") and wildcard is not None and value == wildcard:
            return True
        if keyword == "type":
            return is_of(value, [wanted] if isinstance(wanted, str) else wanted)
        if keyword in ("enum", "const"):
            equal = [each for each in (wanted if keyword == "enum" else [wanted]) if each == value]
            if not equal:
                return None if schema.get("ignoreCase") else False
            return any(type(each) is type(value) for each in equal) or None  # 1 is not true
        if keyword in BOUNDS:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            return not is_number or BOUNDS[keyword](value, wanted)
        if keyword in ("required", "eventuallyRequired"):  # null may count as absent
            present = [key in fields and (fields[key] is not None or None) for key in wanted]
            return not isinstance(value, dict) or _every(present)
        if keyword == "properties":
            return _every(fits(wanted[key], each) for key, each in fields.items() if key in wanted)
        if keyword == "additionalProperties":
            known = schema.get("properties", {})
            return _every(fits(wanted, each) for key, each in fields.items() if key not in known)
        if keyword == "items":
            return not isinstance(value, list) or _every(fits(wanted, each) for each in value)
        if keyword in ("$ref", "optionalRef") and named is not None:
            return (keyword == "optionalRef" and value is None) or fits(named(wanted), value)
        if keyword in ("union", "anyOf"):
            found = (fits(each, value) for each in (wanted["items"] if keyword == "union" else wanted))
            return any(found) or None
        if keyword in ("checks", "allOf"):
            return _every(fits(each, value) for each in (wanted if keyword == "allOf" else wanted.values()))
        if keyword == "if":
            condition = fits(wanted, value)
            return fits(schema.get("then", True), value) if condition else None if condition is None else True
        if keyword == "not":
            inner = fits(wanted, value)
            return None if inner is None else not inner
        return None

    return fits(schema, value) is True


def _every(verdicts: Iterable[Verdict]) -> Verdict:
    found: Verdict = True
    for verdict in verdicts:
        if verdict is False:
            return False
        found = found and verdict
    return found
