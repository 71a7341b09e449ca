"""``det-ds checkpoint``: look into checkpoints, verify, compare, export and import them. One file a command."""

from __future__ import annotations

import click

from determined_ds.cli.checkpoint.diff import diff
from determined_ds.cli.checkpoint.export import export
from determined_ds.cli.checkpoint.import_weights import import_weights
from determined_ds.cli.checkpoint.show import show
from determined_ds.cli.checkpoint.verify import verify

EPILOG = """\b
PATH is a checkpoint's folder, a run directory or a uuid below runs/; with --run-dir also best, last or a uuid there.

\b
Examples:
  det-ds checkpoint show runs/gpt2
  det-ds checkpoint show best --run-dir runs/gpt2 --json
  det-ds checkpoint verify runs/gpt2
  det-ds checkpoint diff runs/gpt2 runs/gpt2-longer
  det-ds checkpoint export runs/gpt2 --to huggingface --out gpt2-trained
  det-ds checkpoint import gpt2-trained --out runs/start
"""


@click.group(epilog=EPILOG)
def checkpoint() -> None:
    """Look into checkpoints, verify, compare, export and import them."""


checkpoint.add_command(diff)
checkpoint.add_command(export)
checkpoint.add_command(import_weights)
checkpoint.add_command(show)
checkpoint.add_command(verify)
