"""The ``det-ds`` command. A command is imported when it is asked for, and what it needs when it runs."""

from __future__ import annotations

import errno
import importlib
import sys

import click

from determined_ds.errors import EXIT_TRAINING_FAILED, DeterminedDSError, lines_of_error

# Command -> the module that has it under its own name, and what it is for, in a line of a narrow terminal.
COMMANDS = {
    "run": ("cli.run", "Train an experiment here, without a cluster."),
    "check": ("cli.check", "Find what is wrong with an experiment before it is queued."),
    "new": ("cli.new", "Write a new model and its experiment, ready to run."),
    "compare": ("cli.tuning", "Measure strategies side by side: speed and memory."),
    "autotune": ("cli.tuning", "Find the fastest way to do the same training."),
    "search": ("cli.tuning", "Search over hyperparameters here, as a cluster does."),
    "report": ("cli.looking", "Write a page of a run, or of several: curves and results."),
    "watch": ("cli.looking", "Follow a run in the terminal while it trains."),
    "profile": ("cli.looking", "See where the time of a step goes, and what could be faster."),
    "doctor": ("doctor.__main__", "Check what this machine can run, and measure it."),
    "checkpoint": ("cli.checkpoint", "Look into checkpoints; verify, compare, export, import."),
}


class _Commands(click.Group):
    """Prints our errors as a message and exits with their code; a user's mistake prints no traceback."""

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, line = COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(f"determined_ds.{module}"), cmd_name)
        command.short_help = line
        return command

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

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
