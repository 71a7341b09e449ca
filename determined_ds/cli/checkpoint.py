"""``det-ds checkpoint``: look into checkpoints, verify, compare, export and import them."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from determined_ds.checkpoints.files import Checkpoint
from determined_ds.cli.options import json_option
from determined_ds.memory.units import format_bytes, format_count
from determined_ds.report.numbers import count
from determined_ds.rundir.handed_on import LAST
from determined_ds.rundir.metrics_file import jsonable
from determined_ds.rundir.run_dir import CHECKPOINTS, RunDir, short

EXIT_FOUND = 1  # something is damaged, or differs
LARGEST_FILES = 8
MOST_DIFFERENCES = 20
COLOURS = {"intact": "green", "damaged": "red", "unverified": "yellow"}

EPILOG = """\b
PATH is a checkpoint's folder, a run directory or a uuid below runs/; with --run-dir also best, last or a uuid there.

\b
Examples:
  det-ds checkpoint show runs/gpt2
  det-ds checkpoint show best --run-dir runs/gpt2 --json
  det-ds checkpoint verify runs/gpt2
  det-ds checkpoint diff runs/gpt2 runs/gpt2-longer
  det-ds checkpoint export runs/gpt2 --to huggingface --output gpt2-trained
  det-ds checkpoint import gpt2-trained --output runs/start
"""
A_PATH = click.Path(path_type=Path)
A_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)
FORMS = click.Choice(["huggingface", "safetensors", "torch"])
TOLERANCE_HELP = "The largest absolute difference of two elements that are equal.  [default: 0]"
OUTPUT_HELP = (
    "The folder to make (torch: the file). Default: RUN/exported/NAME-TO; beside a checkpoint without a run."
)
CONFIG_HELP = "A folder with the config.json and tokenizer of the model; the trial is not run then."
run_dir_option = click.option("--run-dir", type=A_PATH, help="Of best, last, or a uuid given as PATH.")


@click.group(epilog=EPILOG)
def checkpoint() -> None:
    """Look into checkpoints, verify, compare, export and import them."""
    os.environ["DS_ACCELERATOR"] = "cpu"  # before DeepSpeed is loaded, which looks for a GPU


@checkpoint.command()
@click.argument("path")
@run_dir_option
@json_option
def show(path: str, run_dir: Path | None, as_json: bool) -> None:
    """Show what a checkpoint holds: steps, strategy, sizes, and each tensor. Nothing is verified, see verify."""
    from determined_ds.checkpoints.look import describe

    found = describe(_find(path, run_dir)[0].path)
    if as_json:
        click.echo(json.dumps(jsonable(found)))
        return
    epochs = found["epochs_trained"]
    lines = {
        "path": short(Path(found["path"])),
        "steps": f"{found['steps_completed']}" + ("" if epochs is None else f" ({count(epochs, 'epoch')})"),
        "trial": found["trial"],
        "experiment": found["experiment"],
        "strategy": ", ".join(f"{key} {value}" for key, value in found["strategy"].items()) or "unknown",
        "written by": found["ranks"] and count(found["ranks"], "rank"),
        "framework": found["framework"],
        "size": f"{format_bytes(found['bytes'])} in {count(len(found['files']), 'file')}",
        "manifest": "" if found["sealed"] else "none: nothing can be verified",
    }
    click.echo(f"checkpoint {found['uuid']}")
    for label, text in lines.items():
        if text:
            click.echo(f"  {label:<11} {text}")
    indexed = [engine for engine in found["engines"] if engine["tensors"] is not None]
    for engine in indexed:
        sizes = (format_bytes(engine["bytes"]), count(len(engine["tensors"]), "tensor"))
        parts = [*sizes, f"{format_count(engine['parameters'])} parameters", engine["optimizer"]]
        click.echo(f"\n{engine['name']}  {', '.join(filter(None, parts))}")
        rows = []
        for each in engine["tensors"]:
            holds = [each["kind"]] * (each["kind"] != "trained")
            holds += [state for state in each["states"] if state != "weight"]
            names, shape = " = ".join([each["name"], *each["aliases"]]), " x ".join(map(str, each["shape"]))
            size = format_bytes(each["bytes"])
            rows.append((names, shape or "scalar", (each["dtype"] or "").lower(), size, ", ".join(holds)))
        _print_table(("tensor", "shape", "dtype", "size", "holds"), rows)
    if len(indexed) < max(1, len(found["engines"])):
        largest = sorted(found["files"].items(), key=lambda item: -item[1])[:LARGEST_FILES]
        click.echo("\nthe largest files, as not every engine has an index of its tensors:")
        _print_table(("file", "size"), [(name, format_bytes(size)) for name, size in largest])


@checkpoint.command()
@click.argument("paths", metavar="PATH...", nargs=-1, required=True)
@run_dir_option
@json_option
def verify(paths: tuple[str, ...], run_dir: Path | None, as_json: bool) -> None:
    """Read every file and compare it with the checkpoint's manifest; of a run directory, all of its checkpoints.

    Exit code: 0 no file is damaged, 1 one is, 2 there is no such checkpoint.
    """
    from determined_ds.checkpoints.look import verify as verified

    answers = []
    for each in (each for given in paths for each in _find(given, run_dir)[: 1 if given == LAST else None]):
        answer = verified(each)
        if not each.path.is_dir():  # a run that is writing has deleted it meanwhile
            continue
        answers.append(answer)
        if not as_json:
            state = click.style(f"{answer['state']:<10}", fg=COLOURS[answer["state"]])
            size = f"{answer['files']} files, {format_bytes(answer['bytes'])}"
            click.echo(f"{state} {each.uuid}  batch {each.steps_completed:<7}  {size}")
            for damage in answer["damages"]:
                click.echo(f"           {damage}")
    if as_json:
        click.echo(json.dumps({"version": 1, "checkpoints": answers}, indent=2))
    sys.exit(EXIT_FOUND if any(each["state"] == "damaged" for each in answers) else 0)


@checkpoint.command()
@click.argument("first")
@click.argument("second")
@run_dir_option
@click.option("--weights", is_flag=True, help="Compare weights alone, not the optimizer's states.")
@click.option("--tolerance", type=click.FloatRange(min=0), default=0.0, help=TOLERANCE_HELP)
@json_option
def diff(
    first: str, second: str, run_dir: Path | None, weights: bool, tolerance: float, as_json: bool
) -> None:
    """Find the first tensor that differs between two checkpoints, whichever ranks and strategies wrote them.

    Exit code: 0 all tensors are equal, 1 one differs, 2 there is no such checkpoint.
    """
    from determined_ds.checkpoints.look import differences

    one, other = (_find(word, run_dir)[0] for word in (first, second))
    found, weights_only = differences(one.path, other.path, weights_only=weights, tolerance=tolerance)
    compared = "weights" if weights_only else "tensors"
    if as_json:
        answer = {"version": 1, "compared": compared, "equal": not found, "differences": found}
        click.echo(json.dumps(jsonable(answer), indent=2))
        sys.exit(EXIT_FOUND if found else 0)
    click.echo(f"first   batch {one.steps_completed}, {short(one.path)}")
    click.echo(f"second  batch {other.steps_completed}, {short(other.path)}")
    if weights_only:
        click.echo("weights alone are compared, not the optimizer's states")
    if not found:
        within = f" within {tolerance:g}" if tolerance else ""
        click.echo(click.style(f"all {compared} are equal{within}", fg="green"))
        return
    tensors = {(each["engine"], each["tensor"]) for each in found}
    click.echo(click.style(f"{count(len(tensors), 'tensor')} with differences", fg="red") + "; the first:")
    rows = []
    for each in found[:MOST_DIFFERENCES]:
        where, values, largest = "", "", ""
        if each["values"] is not None:
            values = " / ".join(f"{value:.6g}" for value in each["values"])
            where, largest = str(list(each["place"])), f"{each['largest']:.3g}"
        name = f"{each['engine']} {each['tensor']}".rstrip()
        rows.append((name, each["state"], each["message"], where, values, largest))
    _print_table(("tensor", "state", "what differs", "at", "values", "largest"), rows)
    if len(found) > MOST_DIFFERENCES:
        click.echo(f"  ... and {len(found) - MOST_DIFFERENCES} more; --json lists all")
    sys.exit(EXIT_FOUND)


@checkpoint.command()
@click.argument("path")
@run_dir_option
@click.option("--to", type=FORMS, required=True, help="The form.")
@click.option("--output", type=A_PATH, help=OUTPUT_HELP)
@click.option("--dtype", type=click.Choice(("fp32", "bf16", "fp16")), help="Default: as the model computes.")
@click.option("--merge-lora", is_flag=True, help="Merge adapters into the weights, as peft does.")
@click.option("--engine", type=click.IntRange(min=0), default=0, show_default=True, help="Of several, which.")
@click.option("--force", is_flag=True, help="Replace an earlier export at --output; never another folder.")
@click.option(
    "--context-dir", type=A_FOLDER, default=Path(), help="With the trial's code, for --to huggingface."
)
@click.option("--config", type=A_FOLDER, help=CONFIG_HELP)
@json_option
def export(path: str, run_dir: Path | None, output: Path | None, as_json: bool, **options: Any) -> None:
    """Export a checkpoint, whichever ranks and strategy wrote it: for Hugging Face or for torch.

    It needs no GPU and no ranks, and about as much memory as the largest tensor.
    """
    from determined_ds.checkpoints.export import export as exported

    found, out = _find(path, run_dir)[0], output
    if out is None:  # never in the current folder: there it would be sent to a cluster, and be offered to git
        folder = found.path.parent
        if folder.name == CHECKPOINTS:
            run, above = RunDir(folder.parent), RunDir(folder.parent.parent)
            # What was superseded is laid out as a run, and deleted by the next one.
            folder = (above if run.path == above.superseded else run).exported
        out = folder / (f"{found.uuid}-{options['to']}" + ".pt" * (options["to"] == "torch"))
    done = exported(found.path, out, **options)
    if as_json:
        click.echo(json.dumps({"version": 1, "uuid": found.uuid, **done}, indent=2))
        return
    for note in done["notes"]:
        click.echo(f"note: {note}", err=True)
    size = f"{count(done['tensors'], 'tensor')}, {format_bytes(done['bytes'])}"
    click.echo(f"batch {found.steps_completed} exported to {short(Path(done['out']))}: {size}")


@checkpoint.command("import")
@click.argument("weights", type=A_PATH)
@click.option("--output", type=A_PATH, required=True, help="The checkpoint's folder, to make.")
@click.option("--prefix", default="", help="To put before every name, e.g. model.")
@click.option("--skip", multiple=True, metavar="PATTERN", help="Names to leave out, e.g. '*.attn.bias'.")
@click.option("--force", is_flag=True, help="Replace an earlier import at --output; never another folder.")
def import_weights(weights: Path, output: Path, **options: Any) -> None:
    """Make a checkpoint to start from of WEIGHTS: a Hugging Face folder, or a file of safetensors or of torch's.

    Under every strategy a rank reads the parts that it holds. Files on the same disk are linked, not copied.
    """
    from determined_ds.checkpoints.export import import_weights as imported

    found = imported(weights, output, **options)
    how = "linked" if found["linked"] else "copied"
    size = f"{count(found['tensors'], 'tensor')}, {format_bytes(found['bytes'])}"
    click.echo(f"{size}, {how} to {short(output)}")
    click.echo(f"to start from it: det-ds run CONFIG . --set searcher.source_checkpoint_uuid={short(output)}")


def _find(given: str, run_dir: Path | None) -> list[Checkpoint]:
    from determined_ds.checkpoints.named import find

    return find(given, None if run_dir is None else RunDir(run_dir), key="PATH")


def _print_table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Rows with aligned columns, folded where the terminal has no room."""
    from rich.console import Console

    from determined_ds.report.numbers import Head, Table

    columns = [Head(text=head, align="right" if head == "size" else "left", folds=True) for head in heads]
    Console(highlight=False).print(Table(heads=columns, rows=rows))
