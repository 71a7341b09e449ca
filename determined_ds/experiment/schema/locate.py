"""Where in a configuration an error of pydantic's stands, and what model judged it.

A location of pydantic's names, beside the keys, the tag of every union on the way; a key has none.
"""

from __future__ import annotations

import types
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import RootModel, Tag
from pydantic.fields import FieldInfo

from determined_ds.documents.document import KeyPath
from determined_ds.experiment.schema.section import Section


@dataclass(frozen=True, kw_only=True)
class Located:
    """The place of an error.

    Args:
        path: Of keys and indexes, as the document has them.
        owner: The model of the mapping that the last key is in; None where it is outside the models.
        tag: Of the union that ``owner`` was chosen from; "" where it was not.
    """

    path: KeyPath
    owner: type[Section] | None
    tag: str

    @property
    def field(self) -> FieldInfo | None:
        """The field of the last key, if its owner has it."""
        return self.owner.model_fields.get(str(self.path[-1])) if self.owner else None


def locate(root: type[Section], location: tuple[str | int, ...]) -> Located:
    """The place of an error in what ``root`` is the model of."""
    annotation: Any = root
    path: KeyPath = ()
    owner: type[Section] | None = None
    owner_tag = tag = ""
    for step in location:
        annotation = _bare(annotation)
        members = _members(annotation)
        if step in members:
            annotation, tag = members[step], str(step)
            continue
        is_section = isinstance(annotation, type) and issubclass(annotation, Section)
        owner, owner_tag = (annotation, tag) if is_section else (None, "")
        annotation, tag = _below(annotation, step), ""
        path = (*path, step)
    return Located(path=path, owner=owner, tag=owner_tag)


def _bare(annotation: Any) -> Any:
    """Without what may be null, what is annotated to it, and what wraps it."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif isinstance(annotation, type) and issubclass(annotation, RootModel):
            annotation = annotation.model_fields["root"].annotation
        elif get_origin(annotation) in (Union, types.UnionType):
            some = [member for member in get_args(annotation) if member is not type(None)]
            if len(some) > 1:
                return annotation
            annotation = some[0]
        else:
            return annotation


def _members(annotation: Any) -> dict[str | int, Any]:
    """The members of a union by their tags."""
    if get_origin(annotation) not in (Union, types.UnionType):
        return {}
    return {
        note.tag: member
        for member in get_args(annotation)
        for note in getattr(member, "__metadata__", ())
        if isinstance(note, Tag)
    }


def _below(annotation: Any, step: str | int) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        field = annotation.model_fields.get(str(step))
        return field.annotation if field else Any
    inner = get_args(annotation)
    return inner[-1] if inner else Any
