"""The ``det-ds`` command. Commands import what they need when they run, so that ``--help`` is quick."""

from __future__ import annotations

import errno
import sys

import click

from determined_ds.cli.autotune import autotune
from determined_ds.cli.bench import bench
from determined_ds.cli.check import check
from determined_ds.cli.checkpoint import checkpoint
from determined_ds.cli.compare import compare
from determined_ds.cli.estimate import estimate
from determined_ds.cli.generate import generate
from determined_ds.cli.new import new
from determined_ds.cli.profile import profile
from determined_ds.cli.render import render
from determined_ds.cli.report import report
from determined_ds.cli.run import run
from determined_ds.cli.search import search
from determined_ds.cli.watch import watch
from determined_ds.config.aliases import option_instead
from determined_ds.doctor.doctor import doctor
from determined_ds.errors import EXIT_TRAINING_FAILED, DeterminedDSError, lines_of_error


class _Commands(click.Group):
    """Prints our errors as a message and exits with their code; a user's mistake prints no traceback."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except click.NoSuchOption as error:
            instead = _instead(error)
            if instead:
                said = f"{error.message.rstrip('.')}. {instead}."
                raise click.NoSuchOption(error.option_name, said, ctx=error.ctx) from None
            raise
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


def _instead(error: click.NoSuchOption) -> str:
    """What to write for an option by another name."""
    if error.ctx is None:
        return ""
    options = [name for parameter in error.ctx.command.params for name in parameter.opts]
    instead = option_instead(error.option_name, options)
    return f"Write {instead}" if instead else ""


def _hyphenated(option: str) -> str:
    """An option as it is written here: ``--model_size`` is ``--model-size``."""
    return option.replace("_", "-")


SETTINGS = {"help_option_names": ["-h", "--help"], "token_normalize_func": _hyphenated}


@click.group(cls=_Commands, context_settings=SETTINGS)
@click.version_option(package_name="determined-ds", prog_name="det-ds")
def main() -> None:
    """Train with DeepSpeed, the same here and on a Determined cluster."""


main.add_command(autotune)
main.add_command(bench)
main.add_command(check)
main.add_command(checkpoint)
main.add_command(compare)
main.add_command(doctor)
main.add_command(estimate)
main.add_command(generate)
main.add_command(new)
main.add_command(profile)
main.add_command(render)
main.add_command(report)
main.add_command(run)
main.add_command(search)
main.add_command(watch)
