"""``det-ds new``: the files of a new model and its experiment, or of an experiment for a model of a given size."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from determined_ds.cli.options import Count

if TYPE_CHECKING:
    from collections.abc import Sequence

    from determined_ds.config.strategy import Strategy
    from determined_ds.memory.fitting import Fit
    from determined_ds.memory.plan import PlanRequest

EPILOG = """\b
Examples:
  det-ds new my_model
  det-ds new my_pipeline --kind pipeline
  det-ds new my_bert --from bert
  det-ds new --experiment --parameters 6B --slots 32 --gpu-memory 80GiB --global-batch-size 64 --sequence-length 2048
"""
# Options that an experiment needs.
NEEDED = {
    "parameters": "Parameters of the model, e.g. 6B",
    "slots": "GPUs in all",
    "gpu_memory": "Memory of one GPU, e.g. 80GiB",
    "global_batch_size": "Samples an optimizer step, all GPUs together",
    "sequence_length": "Tokens a sample",
}
COUNT = Count()


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
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
@click.option(
    "--experiment", is_flag=True, help="An experiment and its DeepSpeed JSON alone, by the options below."
)
@click.option("--parameters", metavar="COUNT", help="Of the model: 6B, 345M, 1.5e9.")
@click.option("--slots", type=COUNT, help="GPUs of a trial, on all machines.")
@click.option("--gpu-memory", metavar="SIZE", help="Of one slot: 80GiB, 24GB.")
@click.option("--global-batch-size", type=COUNT, help="Samples an optimizer step, all replicas.")
@click.option("--sequence-length", type=COUNT, help="Tokens a sample.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: bf16]")
@click.option(
    "--offload",
    type=click.Choice(["none", "auto", "cpu", "nvme"]),
    help="cpu, nvme: where the optimizer is kept, and the parameters if needed. auto: cpu, if nothing fits without."
    "  [default: none]",
)
@click.option("--nvme-path", metavar="FOLDER", help="On a local disk, for --offload nvme.")
@click.option("--pipe-parallel-size", type=COUNT, help="Pipeline stages.  [default: 1]")
@click.option(
    "--entrypoint",
    metavar="MODULE:TRIAL|SCRIPT",
    help="The trial or the script (train.py ARGS, -m package.train ARGS) to run.  [default: GPT-2's trial]",
)
@click.option("--dry-run", is_flag=True, help="Print the two files; write nothing.")  # fmt: skip
def new(
    name: str | None,
    kind: str | None,
    model: str | None,
    output: Path,
    force: bool,
    experiment: bool,
    **asked: Any,
) -> None:
    """Write a new model and its experiment, ready to run and to change.

    They go to model_defs/NAME and experiments/NAME. Files that other models share (model_defs/common, DeepSpeed
    JSONs) are written where they are missing.

    With --experiment: list the ZeRO stages and offloads that a model of a given size could be trained with, the one
    that communicates least first, and write the DeepSpeed JSON and the YAML of the first that fits, to
    experiments/deepspeed/NAME.json and experiments/NAME.yaml.
    """
    from determined_ds.documents.files import write_files
    from determined_ds.scaffold.copies import copy_of
    from determined_ds.scaffold.templates import files_of

    if experiment:
        if kind or model:
            raise click.UsageError("--experiment is not for a new model: leave out --kind and --from.")
        _new_experiment(name, output, force, **asked)
        return
    if idle := [each for each, value in asked.items() if value not in (None, False)]:
        raise click.UsageError(f"{', '.join(map(_flag, idle))} only with --experiment.")
    if name is None:
        raise click.UsageError("Missing argument 'NAME'.")
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


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _new_experiment(name: str | None, output: Path, force: bool, *, dry_run: bool, **asked: Any) -> None:
    from determined_ds.documents.files import write_files
    from determined_ds.errors import ConfigError
    from determined_ds.memory.plan import (
        candidates,
        default_name,
        experiment_files,
        nothing_fits,
        read_request,
    )

    asked = {key: value for key, value in asked.items() if value is not None}
    _check_given(asked)
    request = read_request(**asked)
    considered = list(candidates(request))
    strategy = next((each.strategy for each in considered if each.fits), None)
    if strategy is None:
        _show(request, considered, None, err=True)
        raise ConfigError(nothing_fits(request, considered))
    name = default_name(request, strategy) if name is None else name
    _check_names(name, request.entrypoint)
    files = experiment_files(request, strategy, name)
    warnings = _proved(files, output)
    if "entrypoint" not in asked:
        stands_in = (
            f"{request.entrypoint} stands in for your model: name your own by --entrypoint MODULE:TRIAL"
        )
        warnings.insert(0, f"{stands_in}, or --entrypoint train.py")
    if not dry_run:
        write_files({output / path: text for path, text in files.items()}, overwrite=force)
    _show(request, considered, strategy, err=dry_run)
    if dry_run:
        click.echo("\n".join(f"# {path}\n{text}" for path, text in files.items()), nl=False)
    else:
        for path in files:
            click.echo(f"wrote {output / path}")
        elsewhere = "" if output == Path() else f" --context {output}"
        click.echo(f"next: det-ds check {output / next(iter(files))}{elsewhere}")
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)


def _check_given(asked: dict[str, Any]) -> None:
    """Name every option that an experiment needs and that is missing."""
    from determined_ds.errors import ConfigError, Problem

    if missing := [name for name in NEEDED if name not in asked]:
        raise ConfigError(
            Problem(
                key=_flag(name), message="missing", fix=f"give {_flag(name)} ({NEEDED[name]})", code="missing"
            )
            for name in missing
        )


def _check_names(name: str, trial: str) -> None:
    """Refuse a name that is not a valid file name, and a trial that is neither MODULE:CLASS nor a script."""
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.entrypoint import CLASS, read_entrypoint
    from determined_ds.memory.plan import entrypoint_of

    problems = []
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in name)
    safe = safe.lstrip("-.")[:100]
    if safe != name or not name:
        fix = f"use letters, digits, `-`, `_` and `.`, e.g. {safe or 'gpt2_6b'}"
        problems.append(
            Problem(key="NAME", value=name, message="is not a valid file name", fix=fix, code="name")
        )
    message = ""
    words = trial.removeprefix("python3 ").split() or [""]
    if not (CLASS.fullmatch(trial) or words[0].endswith(".py") or words[0] == "-m"):
        message = "is neither MODULE:CLASS nor a script"
    else:
        try:
            read_entrypoint(entrypoint_of(trial))
        except ConfigError as error:
            message = error.problems[0].message
    if message:
        fix = "write e.g. model_defs.mine.trial:MyTrial, or 'train.py --epochs 3'"
        problems.append(Problem(key="--entrypoint", value=trial, message=message, fix=fix, code="entrypoint"))
    if problems:
        raise ConfigError(problems)


def _proved(files: dict[str, str], context_dir: Path) -> list[str]:
    """Resolve the YAML and its JSON as a run does, before anything is written; its warnings."""
    from determined_ds.check.trial import code_problems
    from determined_ds.config.layout import assumed_cuda
    from determined_ds.config.resolve import reconcile
    from determined_ds.documents.text import parse_json, parse_yaml
    from determined_ds.experiment.experiment import parse_experiment

    (yaml_path, yaml), (json_path, ds_config) = files.items()
    experiment, ds = parse_experiment(parse_yaml(yaml, yaml_path)), parse_json(ds_config, json_path)
    gpus = assumed_cuda(experiment.slots)
    resolved = reconcile(experiment.hyperparameters, ds, slots=experiment.slots, accelerator=gpus)
    return [str(problem) for problem in (*resolved.warnings, *code_problems(experiment, context_dir))]


def _show(request: PlanRequest, considered: Sequence[Fit], strategy: Strategy | None, *, err: bool) -> None:
    """Print the candidates, the chosen one marked."""
    from determined_ds.cli.memory import memory_table, strategy_label
    from determined_ds.memory.fitting import usable_bytes
    from determined_ds.memory.units import format_bytes, format_count

    chosen = next((each for each in considered if each.fits), None)
    names = []
    for row in considered:
        more = ", recomputed" if row.strategy.activation_checkpointing else ""
        names.append(f"{strategy_label(row.strategy)}{more}{' *' if row is chosen else ''}")
    shape, gpu = request.shape, request.gpu_memory_bytes
    lines = [
        f"{format_count(shape.num_parameters)} parameters on {request.slots} x {format_bytes(gpu)}"
        f" ({format_bytes(usable_bytes(gpu))} usable), {request.global_batch_size:,} samples of"
        f" {shape.sequence_length:,} tokens a step, {request.precision}",
        "",
        *memory_table(names, considered, gpu, as_candidates=True),
        "",
    ]
    if strategy is not None:
        lines += ["* chosen: the first that fits; those above it communicate less, or as much"]
        lines.append(
            f"{request.global_batch_size:,} samples = micro-batch {strategy.micro_batch_size} x"
            f" accumulation {strategy.accumulation} x replicas {strategy.replicas}"
        )
    lines.append("recomputed: activation checkpointing; micro: the largest micro-batch that divides and fits")
    click.echo("\n".join(lines), err=err)
