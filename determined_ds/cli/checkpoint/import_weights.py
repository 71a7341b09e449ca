"""``det-ds checkpoint import``: weights of another program to start from."""

from __future__ import annotations

import os
from pathlib import Path

import click

from determined_ds.cli.checkpoint.byte_bar import byte_bar


@click.command("import")
@click.argument("weights", type=click.Path(path_type=Path))
@click.option(
    "--out", type=click.Path(path_type=Path), required=True, help="The checkpoint's folder, to make."
)
@click.option("--prefix", default="", help="To put before every name, e.g. model.")
@click.option(
    "--skip", multiple=True, metavar="PATTERN", help="Names to leave out, e.g. '*.attn.bias'. Repeatable."
)
@click.option("--force", is_flag=True, help="Replace an earlier import at --out; never another folder.")
def import_weights(weights: Path, out: Path, prefix: str, skip: tuple[str, ...], force: bool) -> None:
    """Make a checkpoint to start from of WEIGHTS: a Hugging Face folder, or a file of safetensors or of torch's.

    Under every strategy a rank reads the parts that it holds. Files on the same disk are linked, not copied.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded, which looks for a GPU
    from determined_ds.checkpoints.importing import import_weights
    from determined_ds.memory.units import format_bytes
    from determined_ds.protocol.handed_on import count
    from determined_ds.protocol.run_dir import short

    found = import_weights(
        weights,
        out,
        prefix=prefix,
        skip=skip,
        force=force,
        stage=lambda said, num_bytes: byte_bar(num_bytes, said, hidden=False),
    )
    how = "linked" if found.linked else "copied"
    click.echo(
        f"{count(found.num_tensors, 'tensor')}, {format_bytes(found.num_bytes)}, {how} to {short(out)}"
    )
    click.echo(f"to start from it: det-ds run CONFIG . --set searcher.source_checkpoint_uuid={short(out)}")
