"""``det-ds checkpoint`` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from click.testing import CliRunner

from determined_ds.cli.main import main


def checkpoint(*words: str | Path) -> Any:
    """The result of ``det-ds checkpoint WORDS``; nothing but a message and an exit code may come of a mistake."""
    done = CliRunner().invoke(main, ["checkpoint", *map(str, words)])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def succeeded(*words: str | Path) -> str:
    """What ``det-ds checkpoint WORDS`` prints, which must succeed."""
    done = checkpoint(*words)
    assert done.exit_code == 0, done.output
    return str(done.output)
