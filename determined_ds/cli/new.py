"""``det-ds new``: the files of a new model and its experiment, or of an experiment for a model of a given size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from determined_ds.cli.options import COUNT

EPILOG = """\b
Examples:
  det-ds new my_model
  det-ds new my_pipeline --kind pipeline
  det-ds new my_bert --from bert
  det-ds new --experiment --parameters 6B --slots 32 --gpu-memory 80GiB --global-batch-size 64 --sequence-length 2048
"""
NEEDED = ("parameters", "slots", "gpu_memory", "global_batch_size", "sequence_length")  # by an experiment
KINDS = ["data-parallel", "pipeline", "two-engine"]
KIND_HELP = """Replicas (ZeRO 0 to 3), pipeline stages, or two models that train against each other.  [default:
data-parallel]"""
FROM_HELP = (
    "Copy an example with its experiments: bert, causal_lm, dcgan, drivable_vit, gpt2, hf_trainer or vit."
)
OFFLOAD_HELP = (
    "Keep the optimizer, and the parameters if needed, in host memory; auto: if nothing fits without."
)
CODE_HELP = "The trial or the script (train.py ARGS, -m package.train ARGS) to run.  [default: GPT-2's trial]"


@click.command(epilog=EPILOG)
@click.argument("name", required=False)
@click.option("--kind", type=click.Choice(KINDS), help=KIND_HELP)
@click.option("--from", "model", metavar="MODEL", help=FROM_HELP)
@click.option("-o", "--output", type=click.Path(path_type=Path), default=".", help="The context directory.")
@click.option("--force", is_flag=True, help="Replace existing files of the model.")
@click.option("--experiment", is_flag=True, help="An experiment and its JSON alone, by the options below.")
@click.option("--parameters", metavar="COUNT", help="Of the model: 6B, 345M, 1.5e9.")
@click.option("--slots", type=COUNT, help="GPUs of a trial, on all machines.")
@click.option("--gpu-memory", metavar="SIZE", help="Of one slot: 80GiB, 24GB.")
@click.option("--global-batch-size", type=COUNT, help="Samples an optimizer step, all replicas.")
@click.option("--sequence-length", type=COUNT, help="Tokens of a sample.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "fp32"]), help="[default: bf16]")
@click.option("--offload", type=click.Choice(["none", "auto", "cpu"]), help=OFFLOAD_HELP)
@click.option("--pipe-parallel-size", type=COUNT, help="Pipeline stages.  [default: 1]")
@click.option("--entrypoint", metavar="MODULE:TRIAL|SCRIPT", help=CODE_HELP)
@click.option("--dry-run", is_flag=True, help="Print the two files; write nothing.")
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
    from determined_ds.scaffold import copy_of, files_of

    if sum(map(bool, (kind, model, experiment))) > 1:
        raise click.UsageError("--kind, --from and --experiment exclude each other")
    asked = {option: value for option, value in asked.items() if value not in (None, False)}
    if experiment:
        _new_experiment(name, output, force, dry_run=asked.pop("dry_run", False), asked=asked)
        return
    if asked:
        raise click.UsageError(f"{', '.join(map(_flag, asked))} only with --experiment.")
    if name is None:
        raise click.UsageError("Missing argument 'NAME'.")
    new_files = copy_of(model, name) if model else files_of(name, kind or "data-parallel")
    missing = {path: text for path, text in new_files.shared.items() if not (output / path).exists()}
    files = new_files.own | missing
    write_files({output / path: text for path, text in files.items()}, overwrite=force)
    for path in files:
        click.echo(f"wrote {output / path}")
    click.echo(f"next:  det-ds run {output / 'experiments' / name / 'const.yaml'} {output} --test")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _new_experiment(
    name: str | None, output: Path, force: bool, *, dry_run: bool, asked: dict[str, Any]
) -> None:
    """List the candidates, and write or print the files of the first one that fits."""
    from determined_ds.check.trial import code_problems
    from determined_ds.cli.memory import memory_table, strategy_label
    from determined_ds.config.layout import assumed_cuda
    from determined_ds.config.resolve import reconcile
    from determined_ds.documents.files import write_files
    from determined_ds.documents.text import parse_json, parse_yaml
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.experiment import parse_experiment
    from determined_ds.memory import plan
    from determined_ds.memory.units import format_bytes, format_count

    if missing := [_flag(option) for option in NEEDED if option not in asked]:
        fix = "give it; det-ds new --help says what it is"
        raise ConfigError(Problem(key=flag, message="missing", fix=fix, code="missing") for flag in missing)
    request = plan.read_request(**asked)
    considered = list(plan.candidates(request))
    chosen = next((each.strategy for each in considered if each.fits), None)

    shape, gpu, samples = request.shape, request.gpu_memory_bytes, f"{request.global_batch_size:,} samples"
    size = f"{format_count(shape.num_parameters)} parameters on {request.slots} x {format_bytes(gpu)}"
    names = []
    for strategy in (each.strategy for each in considered):
        recomputed, star = ", recomputed" * strategy.activation_checkpointing, " *" * (strategy is chosen)
        names.append(strategy_label(strategy) + recomputed + star)
    said = [f"{size}, {samples} of {shape.sequence_length:,} tokens a step, {request.precision}", ""]
    said += [*memory_table(names, considered, gpu, chosen=True), ""]
    if chosen is not None:
        batch = f"micro-batch {chosen.micro_batch_size} x accumulation {chosen.accumulation}"
        said.append(f"* chosen: the first that fits, {samples} = {batch} x replicas {chosen.replicas}")
    said.append("recomputed: activation checkpointing; micro: the largest micro-batch that divides and fits")
    if chosen is None:
        click.echo("\n".join(said), err=True)
        raise ConfigError(plan.nothing_fits(request, considered))
    name = plan.default_name(request, chosen) if name is None else name
    if not re.fullmatch(r"\w[\w.-]{0,99}", name, re.ASCII):
        message, fix = "is not a valid file name", "use letters, digits, `-`, `_` and `.`, e.g. gpt2_6b"
        raise ConfigError(Problem(key="NAME", value=name, message=message, fix=fix, code="name"))
    files = plan.experiment_files(request, chosen, name)
    # Resolved as a run does, before anything is written.
    (yaml_path, yaml), (json_path, ds_config) = files.items()
    written = parse_experiment(parse_yaml(yaml, yaml_path))
    ds, gpus = parse_json(ds_config, json_path), assumed_cuda(written.slots)
    resolved = reconcile(written.hyperparameters, ds, slots=written.slots, accelerator=gpus)
    warnings = [str(problem) for problem in (*resolved.warnings, *code_problems(written, output))]
    if "entrypoint" not in asked:
        name_yours = "name your own by --entrypoint MODULE:TRIAL, or --entrypoint train.py"
        warnings.insert(0, f"{request.entrypoint} stands in for your model: {name_yours}")
    if not dry_run:
        write_files({output / path: text for path, text in files.items()}, overwrite=force)
    click.echo("\n".join(said), err=dry_run)
    if dry_run:
        click.echo("\n".join(f"# {path}\n{text}" for path, text in files.items()), nl=False)
    else:
        for path in files:
            click.echo(f"wrote {output / path}")
        elsewhere = "" if output == Path() else f" {output}"
        click.echo(f"next: det-ds check {output / yaml_path}{elsewhere}")
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
