"""The ``det-ds`` command. A command is imported when it is asked for, and what it needs when it runs."""

from __future__ import annotations

import errno
import importlib
import sys

import click

from determined_ds.errors import EXIT_TRAINING_FAILED, DeterminedDSError, lines_of_error

# Command -> the module that has it under its own name.
COMMANDS = {
    **{name: f"determined_ds.cli.{name}" for name in ("check", "checkpoint", "new", "run")},
    **dict.fromkeys(("autotune", "compare", "search"), "determined_ds.cli.tuning"),
    **dict.fromkeys(("profile", "report", "watch"), "determined_ds.cli.looking"),
    "doctor": "determined_ds.doctor.__main__",
}


class _Commands(click.Group):
    """Prints our errors as a message and exits with their code; a user's mistake prints no traceback."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(COMMANDS[cmd_name]), cmd_name)
        return command

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except DeterminedDSError as error:
            for line in lines_of_error(error):
                click.echo(line, err=True)
            sys.exit(error.exit_code)
        except OSError as error:
            if error.errno != errno.ENOSPC:  # a reader that went away is click's to handle
                raise
            sys.stdout = None  # type: ignore[assignment]  # Python would try to write the rest at its end
            sys.stderr.write(f"error: the output cannot be written: {error.strerror}\n")
            sys.exit(EXIT_TRAINING_FAILED)


# An option as it is written here: ``--model_size`` is ``--model-size``.
SETTINGS = {
    "help_option_names": ["-h", "--help"],
    "token_normalize_func": lambda option: option.replace("_", "-"),
}


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.option("--local-rank", type=int, hidden=True, expose_value=False)  # DeepSpeed's launcher adds it there
@click.version_option(package_name="determined-ds", prog_name="det-ds")
def main() -> None:
    """Train with DeepSpeed, the same here and on a Determined cluster."""


main.commands.update(dict.fromkeys(COMMANDS))  # type: ignore[arg-type]  # the names, for help and suggestions
