"""A checkpoint that a master knows, as a version of a model in its registry."""

from __future__ import annotations

import getpass
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest import mock

from determined_ds.errors import ConfigError, Problem

UNKNOWN_FIX = (
    "give its uuid on the master by --uuid (det experiment list-checkpoints); a run here is known to a master with "
    "--report-to-master"
)


@dataclass(frozen=True, kw_only=True)
class Registered:
    """A version that was registered.

    Args:
        model: The model's name.
        version: Its number.
    """

    model: str
    version: int


class Registry:
    """A master's registry, for one checkpoint; checked before anything is exported.

    Args:
        uuid: Of the checkpoint.
        master: The master's address; None: that of ``DET_MASTER``.

    Raises:
        ConfigError: no master answers, or it knows no such checkpoint.
    """

    def __init__(self, uuid: str, master: str | None = None) -> None:
        from determined.common.api import errors
        from determined.experimental import Determined

        try:
            with mock.patch.object(getpass, "getpass", _refuse_to_ask):
                self._master = Determined(master=master)
            self._checkpoint = self._master.get_checkpoint(uuid)
        except errors.NotFoundException:
            message = f"the master knows no checkpoint {uuid}"
            raise _refused("--register", None, message, UNKNOWN_FIX) from None
        except errors.UnauthenticatedException as error:
            fix = "log in: det user login NAME"
            raise _refused("--register", None, f"the master refuses the user: {error}", fix) from None
        except (errors.BadRequestException, errors.BadResponseException, OSError, ValueError) as error:
            message = f"the master cannot be asked: {str(error).splitlines()[0]}"
            raise _refused("--master", master, message, "export DET_MASTER=http://HOST:8080") from None

    def register(self, name: str, *, notes: str, more: Mapping[str, Any]) -> Registered:
        """Add the checkpoint to a model, which is made if there is none of that name.

        Args:
            name: Of the model.
            notes: Of the version.
            more: Metadata of the version, beside the checkpoint's metrics and its batch.

        Raises:
            ConfigError: the master refuses it.
        """
        from determined.common.api import bindings, errors

        try:
            try:
                model = self._master.get_model(name)
            except errors.NotFoundException:
                model = self._master.create_model(name)
            version = model.register_version(self._checkpoint.uuid)
            # The client's own class sets names and notes alone.
            body = bindings.v1PatchModelVersion(notes=notes, metadata={**self._metrics(), **more})
            bindings.patch_PatchModelVersion(
                model._session, body=body, modelName=model.name, modelVersionNum=version.model_version
            )
        except errors.BadRequestException as error:
            message = f"the master refuses to register it: {error}"
            raise _refused("--register", name, message, "a name of a model that you may change") from None
        return Registered(model=model.name, version=version.model_version)

    def _metrics(self) -> dict[str, Any]:
        """The checkpoint's batch, and the validation after it."""
        found: dict[str, Any] = {}
        metadata = self._checkpoint.metadata or {}
        if "steps_completed" in metadata:
            found["steps_completed"] = metadata["steps_completed"]
        training = self._checkpoint.training
        if training is not None:
            found.update((training.validation_metrics or {}).get("avgMetrics") or {})
        return found


def _refuse_to_ask(*_: object) -> str:
    raise PermissionError("not logged in: run det user login, or set DET_USER and DET_PASS")


def _refused(key: str, value: Any, message: str, fix: str) -> ConfigError:
    given = {} if value is None else {"value": value}
    return ConfigError(Problem(key=key, message=message, fix=fix, code="registry", **given))
