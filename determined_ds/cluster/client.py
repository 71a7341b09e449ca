"""The client of a master, for what a person starts: a report of trials, and a run here that a master is to show."""

from __future__ import annotations

import getpass
from typing import TYPE_CHECKING
from unittest import mock

if TYPE_CHECKING:
    from determined.experimental import Determined


def master_client(master: str | None = None) -> Determined:
    """Log in to a master, as ``det`` does but without asking for a password.

    Args:
        master: Its address; None: that of ``DET_MASTER``.

    Raises:
        PermissionError: nobody is logged in.
        determined.common.api.errors.APIException: the master cannot be reached, or refuses the user.
    """
    from determined.experimental import Determined

    def refuse(*_: object) -> str:
        raise PermissionError("nobody is logged in")

    with mock.patch.object(getpass, "getpass", refuse):
        return Determined(master=master)
