"""``det-ds new``: a model and its experiment, begun."""

from __future__ import annotations

from pathlib import Path

import click

EPILOG = """\b
Examples:
  det-ds new my_model
  det-ds new my_pipeline --kind pipeline
"""


@click.command(epilog=EPILOG)
@click.argument("name")
@click.option(
    "--kind",
    type=click.Choice(["data-parallel", "pipeline", "two-engine"]),
    default="data-parallel",
    show_default=True,
    help="Replicas (ZeRO 0 to 3), stages, or two models that train against each other.",
)
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=".",
    help="The context directory; default: here.",
)
@click.option("--force", is_flag=True, help="Replace files that are there.")
def new(name: str, kind: str, output: Path, force: bool) -> None:
    """Write a model and its experiment, which run as they are.

    They go to model_defs/NAME and experiments/NAME, and are there to be changed.
    """
    from determined_ds.documents.writing import write_files
    from determined_ds.scaffold.files import deepspeed_json_of, files_of

    files = files_of(name, kind)
    json_path, json_text = deepspeed_json_of(kind)
    if not (output / json_path).exists():
        files[json_path] = json_text
    write_files({output / path: text for path, text in files.items()}, overwrite=force)
    for path in files:
        click.echo(f"wrote {output / path}")
    config = output / "experiments" / name / "const.yaml"
    click.echo(f"next:  det-ds run {config} {output} --test")
