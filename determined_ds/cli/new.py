"""``det-ds new``: the files of a new model and its experiment."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds new my_model
  det-ds new my_pipeline --kind pipeline
  det-ds new my_bert --from bert
"""


@click.command(epilog=EPILOG)
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["data-parallel", "pipeline", "two-engine"]),
    help="Replicas (ZeRO 0 to 3), pipeline stages, or two models that train against each other.  "
    "[default: data-parallel]",
)
@click.option(
    "--from",
    "model",
    metavar="MODEL",
    help="Copy an example with its experiments: bert, causal_lm, dcgan, drivable_vit, gpt2, hf_trainer or vit.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=".",
    help="The context directory.  [default: the current folder]",
)
@click.option("--force", is_flag=True, help="Replace existing files of the model.")
def new(name: str, kind: str | None, model: str | None, output: Path, force: bool) -> None:
    """Write a new model and its experiment, ready to run and to change.

    They go to model_defs/NAME and experiments/NAME. Files that other models share (model_defs/common, DeepSpeed
    JSONs) are written where they are missing.
    """
    from determined_ds.documents.writing import write_files
    from determined_ds.scaffold.copies import copy_of
    from determined_ds.scaffold.templates import files_of

    if kind and model:
        raise click.UsageError("--kind and --from exclude each other: the copy has the kind of its model.")
    new_files = copy_of(model, name) if model else files_of(name, kind or "data-parallel")
    missing = {path: text for path, text in new_files.shared.items() if not (output / path).exists()}
    files = new_files.own | missing
    write_files({output / path: text for path, text in files.items()}, overwrite=force)
    for path in files:
        click.echo(f"wrote {output / path}")
    config = output / "experiments" / name / "const.yaml"
    click.echo(f"next:  det-ds run {config} {output} --test")
