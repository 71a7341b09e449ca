"""``det-ds checkpoint show``: what a checkpoint holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.checkpoint.common import columns, json_option, one_checkpoint, run_dir_option

if TYPE_CHECKING:
    from determined_ds.checkpoint.described import Description

LARGEST_FILES = 8


@click.command()
@click.argument("path")
@run_dir_option
@json_option
def show(path: str, run_dir: Path | None, as_json: bool) -> None:
    """Show what a checkpoint holds: steps, strategy, sizes, and each tensor. Nothing is verified, see verify."""
    from determined_ds.checkpoint.described import describe

    described = describe(one_checkpoint(path, run_dir))
    if as_json:
        from determined_ds.protocol.metrics_file import jsonable

        click.echo(json.dumps(jsonable(_described_json(described))))
    else:
        click.echo("\n".join([*_summary(described), *_engines(described)]))


def _described_json(described: Description) -> dict[str, Any]:
    from determined_ds.checkpoint.described import tensors_of

    engines = [
        {
            "name": engine.name,
            "bytes": engine.num_bytes,
            "optimizer": engine.index.optimizer if engine.index else None,
            "parameters": engine.num_parameters,
            "tensors": tensors_of(engine.index) if engine.index else None,
        }
        for engine in described.engines
    ]
    return {
        "version": 1,
        "uuid": described.uuid,
        "path": str(described.path),
        "steps_completed": described.steps_completed,
        "epochs_trained": described.epochs_trained,
        "ranks": described.ranks,
        "trial": described.trial,
        "experiment": described.experiment,
        "framework": described.framework,
        "strategy": dict(described.strategy),
        "sealed": described.is_sealed,
        "bytes": described.num_bytes,
        "files": dict(described.files),
        "engines": engines,
    }


def _summary(described: Description) -> list[str]:
    from determined_ds.checkpoint.described import in_words
    from determined_ds.memory.units import format_bytes
    from determined_ds.protocol.handed_on import count
    from determined_ds.protocol.run_dir import short

    epochs = described.epochs_trained
    size = f"{format_bytes(described.num_bytes)} in {count(len(described.files), 'file')}"
    lines = {
        "steps": f"{described.steps_completed}" + ("" if epochs is None else f" ({count(epochs, 'epoch')})"),
        "trial": described.trial,
        "experiment": described.experiment,
        "strategy": in_words(described.strategy),
        "written by": described.ranks and count(described.ranks, "rank"),
        "framework": described.framework,
        "size": size + ("" if described.is_sealed else ", without a manifest"),
    }
    shown = [f"  {label:<11} {text}" for label, text in lines.items() if text]
    return [f"checkpoint {described.uuid}", f"  {'path':<11} {short(described.path)}", *shown]


def _engines(described: Description) -> list[str]:
    from determined_ds.checkpoint.described import tensors_of
    from determined_ds.memory.units import format_bytes, format_count
    from determined_ds.protocol.handed_on import count

    lines: list[str] = []
    if not described.engines:
        lines += ["", *_largest(described.files)]
    for engine in described.engines:
        head = f"\n{engine.name}  {format_bytes(engine.num_bytes)}"
        if engine.index is None:
            lines += [f"{head}, without an index of its tensors", *_largest(engine.files)]
            continue
        of = f"{count(len(engine.index.tensors), 'tensor')}, {format_count(engine.num_parameters or 0)} parameters"
        lines.append(f"{head}, {of}{', ' * bool(engine.index.optimizer)}{engine.index.optimizer}")
        rows = [_row(tensor) for tensor in tensors_of(engine.index)]
        heads = ("tensor", "shape", "dtype", "norm", "size", "holds")
        lines += columns(heads, rows, right=(3, 4), below=(5,))
    return lines


def _largest(files: Mapping[str, int]) -> list[str]:
    """The largest files, for people."""
    from determined_ds.memory.units import format_bytes

    shown = sorted(files.items(), key=lambda item: -item[1])
    rows = [(name, format_bytes(size)) for name, size in shown[:LARGEST_FILES]]
    rows += [("...", f"{len(shown) - LARGEST_FILES} more")] if len(shown) > LARGEST_FILES else []
    return columns(("file", "size"), rows, right=(1,))


def _row(tensor: dict[str, Any]) -> tuple[str, ...]:
    from determined_ds.memory.units import format_bytes

    name = " = ".join([tensor["name"], *tensor["aliases"]])
    shape = " x ".join(map(str, tensor["shape"])) or "scalar"
    norm = "" if tensor["norm"] is None else f"{tensor['norm']:.6g}"
    holds = [state for state in tensor["states"] if state != "weight"]
    holds = [tensor["kind"]] * (tensor["kind"] != "trained") + holds
    return name, shape, (tensor["dtype"] or "").lower(), norm, format_bytes(tensor["bytes"]), ", ".join(holds)
