"""``checkpoint_storage``, and ``tensorboard_storage``, which has not been used for long.

The master lays a configuration's storage over the cluster's own. What a type needs (a bucket, a path) is
therefore not demanded here: a cluster's storage of that type has it. Where no type is given the cluster's is
used, and the type is inferred from the given keys.
"""

from __future__ import annotations

import posixpath
import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, Tag, ValidationInfo, field_validator

from determined_ds.documents.document import nearest
from determined_ds.documents.values import kind_of
from determined_ds.experiment.schema.section import Natural, Section, Text, by_value, fault


def _within(prefix: str) -> str:
    """Go's pattern: ``..`` as a whole step of the path."""
    if ".." in prefix.split("/"):
        raise fault("out-of-range", "climbs by ..", "write a prefix without .. in it")
    return prefix


Prefix = Annotated[Text, AfterValidator(_within)]


def _clean(path: str) -> str:
    """Go's ``filepath.Clean``: normpath, but for two leading slashes, which become one."""
    return re.sub("^//", "/", posixpath.normpath(path))


class Saves(Section):
    """How many checkpoints are kept."""

    save_experiment_best: Natural | None = None
    save_trial_best: Natural | None = None
    save_trial_latest: Natural | None = None


class SharedFSPlace(Section):
    host_path: Text | None = None
    storage_path: Text | None = None
    propagation: Text | None = None
    container_path: Text | None = None
    checkpoint_path: Text | None = None
    tensorboard_path: Text | None = None

    @field_validator("storage_path")
    @classmethod
    def below_host_path(cls, value: str | None, info: ValidationInfo) -> str | None:
        """As the master has it: a relative path that does not climb, or ``host_path`` is a prefix of it."""
        host_path = info.data.get("host_path")
        if value is None:
            return value
        path = _clean(value)
        if not path.startswith("/"):
            outside = path.startswith("..")
        else:
            outside = host_path is not None and not path.startswith(_clean(host_path))
        if outside:
            fix = "write a relative path without .., or one below host_path"
            raise fault("out-of-range", "lies outside host_path", fix)
        return value


class S3Place(Section):
    bucket: Text | None = None
    access_key: Text | None = None
    secret_key: Text | None = None
    endpoint_url: Text | None = None
    prefix: Prefix | None = None


class GCSPlace(Section):
    bucket: Text | None = None
    prefix: Prefix | None = None


class SharedFS(Saves, SharedFSPlace):
    type: Literal["shared_fs"] = "shared_fs"


class Directory(Saves):
    type: Literal["directory"] = "directory"
    container_path: Text | None = None


class S3(Saves, S3Place):
    type: Literal["s3"] = "s3"


class GCS(Saves, GCSPlace):
    type: Literal["gcs"] = "gcs"


class Azure(Saves):
    type: Literal["azure"] = "azure"
    container: Text | None = None
    account_url: Text | None = None
    credential: Text | None = None
    connection_string: Text | None = None

    @field_validator("connection_string")
    @classmethod
    def credentials_of_one_source(cls, value: str | None, info: ValidationInfo) -> str | None:
        others = [key for key in ("account_url", "credential") if info.data.get(key) is not None]
        if value is not None and others:
            message = f"is given beside {' and '.join(others)}, and one of them is to be used"
            raise fault("invalid", message, "keep connection_string, or account_url with credential")
        return value


KINDS: dict[str, type[Section]] = {
    "shared_fs": SharedFS,
    "directory": Directory,
    "s3": S3,
    "gcs": GCS,
    "azure": Azure,
}
REMOVED = {"hdfs": "shared_fs"}


def _no_such(kind: Any) -> Any:
    usable = f"one of {', '.join(KINDS)}"
    if not isinstance(kind, str):
        raise fault("wrong-type", f"must be {usable}, not {kind_of(kind)}", f"use {usable}")
    if kind in REMOVED:
        raise fault("removed-key", f"{kind} storage has been removed from Determined", f"use {REMOVED[kind]}")
    guess = nearest(kind, KINDS)
    hint = f"did you mean {guess!r}? " if guess else ""
    raise fault("out-of-range", "no such storage", f"{hint}use {usable}")


class UnknownStorage(Saves):
    """Has no type that is known: all that is known of any storage may stand in it."""

    type: Annotated[Text, BeforeValidator(_no_such)] = ""
    access_key: Any = None
    account_url: Any = None
    bucket: Any = None
    checkpoint_path: Any = None
    connection_string: Any = None
    container: Any = None
    container_path: Any = None
    credential: Any = None
    endpoint_url: Any = None
    host_path: Any = None
    prefix: Any = None
    propagation: Any = None
    secret_key: Any = None
    storage_path: Any = None
    tensorboard_path: Any = None
    user: Any = None


def _typed(storage: Any) -> Any:
    """A storage with a type: where it has none, the one that fits; nulls then stand for the cluster's values."""
    if not isinstance(storage, dict) or "type" in storage:
        return storage
    known = UnknownStorage.model_fields
    given = {key: value for key, value in storage.items() if value is not None or key not in known}
    fits = max(KINDS, key=lambda kind: len(given.keys() & KINDS[kind].model_fields.keys()))
    return {**given, "type": fits}


CheckpointStorage = Annotated[
    Annotated[SharedFS, Tag("shared_fs")]
    | Annotated[Directory, Tag("directory")]
    | Annotated[S3, Tag("s3")]
    | Annotated[GCS, Tag("gcs")]
    | Annotated[Azure, Tag("azure")]
    | Annotated[UnknownStorage, Tag("unknown")],
    by_value("type", *KINDS, otherwise="unknown"),
    BeforeValidator(_typed),
]

Bucket = Annotated[Text, Field(description="this type of storage needs one", examples=["my-bucket"])]


class TensorboardSharedFS(SharedFSPlace):
    type: Literal["shared_fs"]
    host_path: Annotated[Text, Field(description="this type of storage needs one", examples=["/data"])]


class TensorboardS3(S3Place):
    type: Literal["s3"]
    bucket: Bucket


class TensorboardGCS(GCSPlace):
    type: Literal["gcs"]
    bucket: Bucket


class UnknownTensorboard(Section, extra="ignore"):
    type: Annotated[
        Literal["shared_fs", "s3", "gcs"], Field(description="it decides the rest", examples=["shared_fs"])
    ]


# No cluster completes it. That the master accepts it at all was read from its Go structs, which have no save_*
# to be filled in here.
TensorboardStorage = Annotated[
    Annotated[TensorboardSharedFS, Tag("shared_fs")]
    | Annotated[TensorboardS3, Tag("s3")]
    | Annotated[TensorboardGCS, Tag("gcs")]
    | Annotated[UnknownTensorboard, Tag("unknown")],
    by_value("type", "shared_fs", "s3", "gcs", otherwise="unknown"),
]
