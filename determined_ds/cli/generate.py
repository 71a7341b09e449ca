"""``det-ds generate``: a DeepSpeed JSON and an experiment YAML for a model on given GPUs, with reasons."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from determined_ds.memory.plan.choose import Plan
    from determined_ds.memory.plan.rendered import GeneratedFiles

EPILOG = """\b
Examples:
  det-ds generate --model-size 6B --gpus 32 --gpu-memory 80GiB --global-batch-size 64 --sequence-length 2048
  det-ds generate --model-size 1.5B --gpus 8 --gpu-memory 24GiB --global-batch-size 64 --sequence-length 1024 --dry-run
"""

# Flags without a default -> the question on a terminal.
QUESTIONS = {
    "model_size": "Parameters of the model, e.g. 6B",
    "gpus": "GPUs in all",
    "gpu_memory": "Memory of one GPU, e.g. 80GiB",
    "global_batch_size": "Samples an optimizer step, all GPUs together",
    "sequence_length": "Tokens a sample",
}
NVME_QUESTION = "Folder on a local disk for what is offloaded"
COUNTS = ("gpus", "global_batch_size", "sequence_length")
REASON_WIDTH = 100
SAFE = "letters, digits, `-`, `_` and `.`"


@click.command(epilog=EPILOG)
@click.option("--model-size", help="Parameters: 6B, 345M, 1.5e9.")
@click.option("--gpus", type=int, help="Slots of a trial, on all machines.")
@click.option("--gpu-memory", help="Of one GPU: 80GiB, 24GB.")
@click.option("--global-batch-size", type=int, help="Samples an optimizer step, all replicas.")
@click.option("--sequence-length", type=int, help="Tokens a sample.")
@click.option("--precision", default="bf16", show_default=True, help="bf16, fp16 or fp32.")
@click.option(
    "--offload",
    default="none",
    show_default=True,
    help="cpu, nvme: where the optimizer is kept, and the parameters if needed. auto: cpu, if nothing fits without.",
)
@click.option("--nvme-path", default="", help="Folder on a local disk, for --offload nvme.")
@click.option("--pipeline", type=int, default=1, show_default=True, help="Pipeline stages; 1: none.")
@click.option(
    "--entrypoint",
    metavar="MODULE:TRIAL|SCRIPT",
    help="The trial or the script (train.py ARGS, -m package.train ARGS) to run; GPT-2's if absent.",
)
@click.option("--name", help="Of the experiment and the files; from size and strategy if absent.")
@click.option(
    "-o",
    "--output",
    "output",
    type=click.Path(path_type=Path),
    default=".",
    show_default=True,
    help="The context directory: the files go to experiments/ in it.",
)
@click.option("--force", is_flag=True, help="Replace existing files.")
@click.option("--stdout", "--dry-run", "dry_run", is_flag=True, help="Print the files; write nothing.")
def generate(
    entrypoint: str | None, name: str | None, output: Path, force: bool, dry_run: bool, **answers: Any
) -> None:
    """Choose ZeRO stage, offload, micro-batch and accumulation for a model on GPUs, and write both files.

    Of a pipeline, choose its schedule too. On a terminal, it asks for missing flags.
    """
    from determined_ds.config.deepspeed.files import deepspeed_config_text
    from determined_ds.documents.writing import write_files
    from determined_ds.experiment.entrypoint import CLASS
    from determined_ds.memory.plan.choose import choose_plan
    from determined_ds.memory.plan.needs import read_needs
    from determined_ds.memory.plan.rendered import default_name, files_of
    from determined_ds.memory.plan.stand_in import GPT2, GPT2_PIPELINE

    is_script = entrypoint is not None and CLASS.fullmatch(entrypoint) is None
    answered = _answered(answers)
    heads = _heads(entrypoint or GPT2, output, answered["model_size"])
    plan = choose_plan(replace(read_needs(**answered, num_heads=heads), is_script=is_script))
    trial = entrypoint or (GPT2_PIPELINE if plan.strategy.pipe_parallel_size > 1 else GPT2)
    name = _checked_name(default_name(plan) if name is None else name, trial)
    json_path, yaml_path = f"experiments/deepspeed/{name}.json", f"experiments/{name}.yaml"
    files = files_of(plan, name=name, trial=trial, ds_config_path=json_path)
    warnings = _proved(files, plan, yaml_path, output)
    json_text = deepspeed_config_text(files.ds_config)
    if dry_run:
        click.echo(f"# {yaml_path}\n{files.experiment}\n# {json_path}\n{json_text}", nl=False)
    else:
        texts = {output / json_path: json_text, output / yaml_path: files.experiment}
        write_files(texts, overwrite=force)
        _report(plan, output, json_path, yaml_path)
    for warning in (*files.notes, *warnings):
        click.echo(f"warning: {warning}", err=True)


def _heads(trial: str, context_dir: Path, model_size: str) -> int | None:
    """Attention heads of the model, as :func:`read_needs` has it: 1 where the trial takes whole sequences."""
    from determined_ds.check.trial_class import computes_on_slices
    from determined_ds.errors import ConfigError
    from determined_ds.experiment.entrypoint import CLASS
    from determined_ds.memory import parse_count
    from determined_ds.memory.plan.stand_in import GPT2, HEADS, nearest_size

    if CLASS.fullmatch(trial) is None or not computes_on_slices(trial, context_dir):
        return 1
    if trial != GPT2:
        return None
    try:
        return HEADS[nearest_size(parse_count(model_size))]
    except ConfigError:  # which is reported with all else
        return 1


def _on_terminal() -> bool:
    return sys.stdin.isatty()


def _answered(answers: dict[str, Any]) -> dict[str, Any]:
    """The flags, with prompts for missing ones; without a terminal, an error that names them all."""
    from determined_ds.errors import ConfigError, Problem

    missing = [name for name in QUESTIONS if answers[name] is None]
    if missing and not _on_terminal():
        raise ConfigError(
            Problem(
                key=_flag(name),
                message="missing",
                fix=f"give {_flag(name)} ({QUESTIONS[name]}), or run it on a terminal, which asks",
                code="missing",
            )
            for name in missing
        )
    answered = dict(answers)
    for name in missing:
        answered[name] = click.prompt(QUESTIONS[name], value_proc=_proc(name), err=True)
    if answered["offload"] == "nvme" and not answered["nvme_path"] and _on_terminal():
        answered["nvme_path"] = click.prompt(NVME_QUESTION, err=True)
    return answered


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _proc(name: str) -> Callable[[str], Any]:
    """Reads an answer; an invalid one is asked for again."""
    from determined_ds.errors import ConfigError
    from determined_ds.memory import parse_bytes, parse_count

    def read(text: str) -> Any:
        try:
            if name in COUNTS:
                count = int(text)
                if count < 1:
                    raise click.BadParameter("must be 1 or more")
                return count
            (parse_bytes if name == "gpu_memory" else parse_count)(text, key=_flag(name))
        except ValueError:
            raise click.BadParameter(f"{text!r} is not a whole number") from None
        except ConfigError as error:
            problem = error.problems[0]
            raise click.BadParameter(f"{text!r} {problem.message}; {problem.fix}") from None
        return text

    return read


def _checked_name(name: str, trial: str) -> str:
    """The name, a valid file name; the trial must be a MODULE:CLASS or a script of Python."""
    from determined_ds.errors import ConfigError, Problem
    from determined_ds.experiment.entrypoint import CLASS, read_entrypoint
    from determined_ds.memory.plan.rendered import entrypoint_of

    problems = []
    safe = "".join(char if char.isascii() and (char.isalnum() or char in "-_.") else "-" for char in name)
    safe = safe.lstrip("-.")[:100]
    if safe != name or not name:
        fix = f"use {SAFE}, e.g. {safe or 'gpt2_6b'}"
        problems.append(
            Problem(key="--name", value=name, message="is not a valid file name", fix=fix, code="name")
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
    return name


def _proved(files: GeneratedFiles, plan: Plan, yaml_path: str, context_dir: Path) -> list[str]:
    """Resolve the pair as a run does, before anything is written; its warnings."""
    from determined_ds.config.accelerator import Accelerator
    from determined_ds.config.reconcile import reconcile
    from determined_ds.documents.document import Document
    from determined_ds.documents.reading import parse_yaml
    from determined_ds.errors import ConfigError
    from determined_ds.experiment.code_check import check_entrypoint
    from determined_ds.experiment.experiment import parse_experiment

    experiment = parse_experiment(parse_yaml(files.experiment, yaml_path))
    ds = Document(name="the DeepSpeed JSON", data=files.ds_config)
    gpus = Accelerator(name="cuda", num_devices=plan.needs.gpus, bf16=True, fp16=True)
    resolved = reconcile(experiment.hyperparameters, ds, slots=experiment.slots, accelerator=gpus)
    warnings = [str(warning) for warning in resolved.warnings]
    try:
        check_entrypoint(experiment, context_dir)
    except ConfigError as error:
        warnings.append(str(error))
    return warnings


def _report(plan: Plan, output: Path, json_path: str, yaml_path: str) -> None:
    for choice in plan.choices:
        click.echo(f"{choice.key}: {choice.value}")
        click.echo(textwrap.fill(choice.reason, REASON_WIDTH, initial_indent="  ", subsequent_indent="  "))
    config = output / yaml_path
    click.echo(f"wrote {config}")
    click.echo(f"wrote {output / json_path}")
    elsewhere = "" if output == Path() else f" --context {output}"
    click.echo(f"next: det-ds check {config}{elsewhere}")
