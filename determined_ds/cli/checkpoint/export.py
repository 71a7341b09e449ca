"""``det-ds checkpoint export``: a checkpoint for other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.checkpoint.byte_bar import byte_bar
from determined_ds.cli.checkpoint.common import json_option, one_checkpoint, run_dir_option

if TYPE_CHECKING:
    from determined_ds.checkpoints.export import Exported

FORMATS = ("huggingface", "safetensors", "torch")
TYPES = ("fp32", "bf16", "fp16")


@click.command()
@click.argument("path")
@run_dir_option
@click.option("--to", type=click.Choice(FORMATS), required=True, help="The form.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The folder to make (torch: the file). Default: RUN/exported/NAME-TO; beside a checkpoint without a run.",
)
@click.option("--dtype", type=click.Choice(TYPES), help="Default: as the model computes.")
@click.option("--merge-lora", is_flag=True, help="Merge adapters into the weights, as peft does.")
@click.option("--shard-size", default="5GB", show_default=True, help="Most of one file of safetensors.")
@click.option("--engine", type=click.IntRange(min=0), default=0, show_default=True, help="Of several, which.")
@click.option("--average", metavar="NAME", help="The averages of this EMA callback in place of the weights.")
@click.option("--force", is_flag=True, help="Replace an earlier export at --out; never another folder.")
@click.option(
    "--context-dir",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    default=Path(),
    help="With the trial's code, for --to huggingface.",
)
@click.option(
    "--own-code", is_flag=True, help="Run the checkpoint's own code/ in place of it. Only if trusted."
)
@click.option(
    "--config",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A folder with the config.json and tokenizer of the model; the trial is not run then.",
)
@json_option
def export(path: str, run_dir: Path | None, out: Path | None, as_json: bool, **options: Any) -> None:
    """Export a checkpoint, whichever ranks and strategy wrote it: for Hugging Face or for torch.

    It needs no GPU and no ranks, and about as much memory as the largest tensor.
    """
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded, which looks for a GPU
    from determined_ds.checkpoints.export import ExportRequest, export
    from determined_ds.memory.units import parse_bytes

    shard_bytes = parse_bytes(options.pop("shard_size"), key="--shard-size")
    found = one_checkpoint(path, run_dir)
    target = out or _beside(found) / (f"{found.name}-{options['to']}" + ".pt" * (options["to"] == "torch"))
    request = ExportRequest(path=found, out=target, shard_bytes=shard_bytes, **options)
    exported = export(request, lambda said, count: byte_bar(count, said, hidden=as_json))
    _show(exported, found, as_json=as_json)


def _beside(checkpoint: Path) -> Path:
    """Where an export lies by default: in its run, or beside a checkpoint that is in none.

    Never in the current folder: there it would be sent to a cluster with the code, and be offered to git.
    """
    from determined_ds.protocol.run_dir import CHECKPOINTS, RunDir

    folder = checkpoint.resolve().parent
    if folder.name != CHECKPOINTS:
        return folder
    run = RunDir(folder.parent)
    if (
        run.path.name == RunDir(run.path.parent).superseded.name
    ):  # laid out as a run, and deleted by the next one
        run = RunDir(run.path.parent)
    return run.exported


def _show(exported: Exported, path: Path, *, as_json: bool) -> None:
    import json

    from determined_ds.memory.units import format_bytes
    from determined_ds.protocol.checkpoint_files import checkpoint_at
    from determined_ds.protocol.handed_on import count
    from determined_ds.protocol.run_dir import short

    if as_json:
        shown = {
            "version": 1,
            "uuid": path.name,
            "out": str(exported.out),
            "tensors": exported.num_tensors,
            "bytes": exported.num_bytes,
            "notes": list(exported.notes),
        }
        click.echo(json.dumps(shown, indent=2))
        return
    for note in exported.notes:
        click.echo(f"note: {note}", err=True)
    size = f"{count(exported.num_tensors, 'tensor')}, {format_bytes(exported.num_bytes)}"
    click.echo(f"batch {checkpoint_at(path).steps_completed} exported to {short(exported.out)}: {size}")
