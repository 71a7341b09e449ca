"""Plan -> the DeepSpeed JSON and the experiment YAML, with the reason of each value as a comment above it.

JSON has no comments; its reasons are in the YAML, above the key that names it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from determined_ds.cluster_log import LOG_POLICIES
from determined_ds.config.deepspeed.files import plain
from determined_ds.documents.reading import dump_yaml
from determined_ds.experiment.entrypoint import CLASS, ENTRYPOINT_FORM, SCRIPT_FORM
from determined_ds.memory import format_bytes, format_count
from determined_ds.memory.plan.choose import Plan
from determined_ds.memory.plan.chosen_json import deepspeed_json
from determined_ds.memory.plan.stand_in import GPT2, GPT2_TRIALS, is_alike, nearest_size
from determined_ds.pipe.orders import INTERLEAVED

# (parameters, learning rate). Source: table 2.1 of the GPT-3 paper, arXiv 2005.14165; so is WEIGHT_DECAY.
LEARNING_RATES = (
    (125e6, 6e-4),
    (350e6, 3e-4),
    (760e6, 2.5e-4),
    (1.3e9, 2e-4),
    (2.7e9, 1.6e-4),
    (6.7e9, 1.2e-4),
    (13e9, 1e-4),
    (175e9, 6e-5),
)
WEIGHT_DECAY = 0.1
TOKENS_A_PARAMETER = 20  # "Training Compute-Optimal Large Language Models", arXiv 2203.15556
BATCHES = 1000
WARMUP_BATCHES = 100
WIDTH = 110
METRIC_OF_SCRIPTS = (
    "The metric by the name under which the script reports it; eval_loss of transformers' Trainer."
)

KEPT_IN_JSON = ("zero_optimization.stage", "offload", "precision", "train_micro_batch_size_per_gpu")


@dataclass(frozen=True, kw_only=True)
class GeneratedFiles:
    """The pair of files, not yet written.

    Args:
        ds_config: The DeepSpeed JSON.
        experiment: The text of the experiment YAML.
        notes: Warnings for the user.
    """

    ds_config: dict[str, Any]
    experiment: str
    notes: tuple[str, ...]


class _Entry(NamedTuple):
    """A key of the YAML with the comments above it; a list of entries as its value is a mapping."""

    key: str
    value: Any
    why: tuple[str, ...] = ()


def default_name(plan: Plan) -> str:
    """The name of the experiment and its files, e.g. ``6b_zero1_32gpu``."""
    strategy = plan.strategy
    words = [format_count(plan.needs.shape.num_parameters).lower()]
    if strategy.pipe_parallel_size > 1:
        words.append(f"pipeline{strategy.pipe_parallel_size}")
    words.append(f"zero{strategy.zero_stage}")
    if strategy.sequence_parallel_size > 1:
        words.append(f"sequence{strategy.sequence_parallel_size}")
    if strategy.offload_optimizer:
        words.append("nvme" if plan.needs.offload == "nvme" else "offload")
    return "_".join([*words, f"{plan.needs.gpus}gpu"])


def entrypoint_of(code: str) -> str:
    """The entrypoint that runs code on all slots.

    Args:
        code: ``MODULE:CLASS``, or a script with its arguments: ``train.py ARGS``, ``-m package.train ARGS``; with
            ``python3`` before it or without.
    """
    if CLASS.fullmatch(code):
        return ENTRYPOINT_FORM.replace(GPT2, code)
    return SCRIPT_FORM.replace("train.py", code.removeprefix("python3 "))


def files_of(plan: Plan, *, name: str, trial: str, ds_config_path: str) -> GeneratedFiles:
    """The pair of files of a plan.

    Args:
        plan: What was chosen.
        name: Of the experiment.
        trial: ``MODULE:CLASS``, GPT-2's with the hyperparameters that it reads; or a script, as for
            :func:`entrypoint_of`.
        ds_config_path: Of the DeepSpeed JSON, relative to the context directory.
    """
    return GeneratedFiles(
        ds_config=deepspeed_json(plan.needs, plan.strategy),
        experiment=_experiment(plan, name, trial, ds_config_path),
        notes=tuple(_notes(plan, trial)),
    )


def _notes(plan: Plan, trial: str) -> Iterator[str]:
    parameters = plan.needs.shape.num_parameters
    if trial in GPT2_TRIALS and not is_alike(parameters):
        yield (
            f"there is no GPT-2 of {format_count(parameters)}: {trial} with model_size {nearest_size(parameters)}"
            " stands in for your model; name your own by --entrypoint MODULE:TRIAL, or --entrypoint train.py"
        )
    if plan.strategy.activation_checkpointing and trial not in GPT2_TRIALS:
        yield (
            f"the {_kind(trial)} must turn activation checkpointing on where hyperparameters.activation_checkpointing"
            " is true"
        )


def _kind(trial: str) -> str:
    return "trial" if CLASS.fullmatch(trial) else "script"


# ----------------------------------------------------------------------------------------------------- the YAML


def _experiment(plan: Plan, name: str, trial: str, ds_config_path: str) -> str:
    needs, strategy = plan.needs, plan.strategy
    pipeline = f"a pipeline of {strategy.pipe_parallel_size}, " if strategy.pipe_parallel_size > 1 else ""
    shape = needs.shape
    head = (
        f"Written by det-ds generate for {format_count(shape.num_parameters)} parameters on {needs.gpus} x"
        f" {format_bytes(needs.gpu_memory_bytes)}, {needs.global_batch_size} samples of {shape.sequence_length}"
        f" tokens a step. Bytes are estimates, for a model of {shape.num_layers} layers of width"
        f" {shape.hidden_size} and a vocabulary of {shape.vocab_size}."
    )
    data = (
        "Without a path: Python's own source, as bytes. Else a file or folder of text, JSON lines or parquet."
    )
    searcher = {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    entries = [
        _Entry("name", name),
        _Entry("description", f"{pipeline}ZeRO {strategy.zero_stage} on {needs.gpus} GPUs"),
        _Entry("entrypoint", entrypoint_of(trial)),
        _Entry("resources", [_Entry("slots_per_trial", needs.gpus, ("One rank a GPU.",))]),
        _Entry(
            "hyperparameters", [*_library_entries(plan, trial, ds_config_path), *_model_entries(plan, trial)]
        ),
        *([_Entry("data", {"path": None, "tokenizer": None}, (data,))] if trial in GPT2_TRIALS else []),
        _Entry("searcher", searcher, () if _kind(trial) == "trial" else (METRIC_OF_SCRIPTS,)),
        _Entry("reproducibility", {"experiment_seed": 0}),
        _Entry("max_restarts", 2),
        _Entry("labels", ("deepspeed", f"zero{strategy.zero_stage}")),
        _Entry("log_policies", LOG_POLICIES, ("A failure that no restart can help is not restarted.",)),
    ]
    return "\n".join([*_comment(head, ""), *_lines(entries, "")]) + "\n"


def _library_entries(plan: Plan, trial: str, ds_config_path: str) -> Iterator[_Entry]:
    strategy = plan.strategy

    def why(key: str) -> str:
        choice = plan.choice(key)
        return f"{choice.key} {choice.value}: {choice.reason}."

    yield _Entry("global_batch_size", plan.needs.global_batch_size, (why("gradient_accumulation_steps"),))
    yield _Entry("data_parallel_world_size", "auto")
    yield _Entry("pipe_parallel_size", strategy.pipe_parallel_size, (why("pipe_parallel_size"),))
    if strategy.sequence_parallel_size > 1:
        yield _Entry(
            "sequence_parallel_size", strategy.sequence_parallel_size, (why("sequence_parallel_size"),)
        )
    if strategy.partition_method is not None:
        yield _Entry("pipe_schedule", strategy.pipe_schedule, (why("pipe_schedule"),))
        if strategy.pipe_schedule == INTERLEAVED:
            yield _Entry("pipe_chunks", strategy.pipe_chunks)
        yield _Entry("partition_method", strategy.partition_method, (why("partition_method"),))
    reasons = ("Reasons for the values in the JSON:", *(why(key) for key in KEPT_IN_JSON))
    yield _Entry("deepspeed_config", ds_config_path, reasons)
    checkpointing = [why("activation_checkpointing")]
    if trial not in GPT2_TRIALS:
        checkpointing.append(
            f"The {_kind(trial)} has to read it: DeepSpeed leaves activation checkpointing to the model."
        )
    yield _Entry("activation_checkpointing", strategy.activation_checkpointing, tuple(checkpointing))
    period = {"validation_period": BATCHES // 10, "checkpoint_period": BATCHES // 2, "reporting_period": 10}
    fit = {key: {"batches": value} for key, value in {"max_length": BATCHES, **period}.items()}
    enough = -(-TOKENS_A_PARAMETER * plan.needs.shape.num_parameters // _tokens(plan))
    length = (
        f"A trial run. {TOKENS_A_PARAMETER} tokens a parameter, the compute-optimal length (arXiv 2203.15556), are"
        f" {enough:,} batches of {_tokens(plan):,} tokens."
    )
    yield _Entry("fit", {**fit, "checkpoint_policy": "best"}, (length,))


def _tokens(plan: Plan) -> int:
    """Tokens of an optimizer step."""
    return plan.needs.global_batch_size * plan.needs.shape.sequence_length


def _model_entries(plan: Plan, trial: str) -> Iterator[_Entry]:
    parameters = plan.needs.shape.num_parameters
    if trial in GPT2_TRIALS:
        stand_in = "The nearest size, in place of your model, which the plan is made for."
        why = f"The GPT-2 of {format_count(parameters)}." if is_alike(parameters) else stand_in
        yield _Entry("model_size", nearest_size(parameters), (why,))
        yield _Entry("dropout", 0.0)
    yield _Entry("sequence_length", plan.needs.shape.sequence_length)
    size, rate = min(LEARNING_RATES, key=lambda row: abs(math.log(row[0] / parameters)))
    why = f"As GPT-3's model of {format_count(int(size))} (arXiv 2005.14165, table 2.1); so is the weight decay."
    yield _Entry("learning_rate", rate, (why,))
    yield _Entry("weight_decay", WEIGHT_DECAY)
    warmup = f"{WARMUP_BATCHES * _tokens(plan):,} tokens, a tenth of the trial run."
    yield _Entry("warmup_num_steps", WARMUP_BATCHES, (warmup,))


def _lines(entries: list[_Entry], indent: str) -> Iterator[str]:
    for entry in entries:
        for why in entry.why:
            yield from _comment(why, indent)
        if isinstance(entry.value, list):
            yield f"{indent}{entry.key}:"
            yield from _lines(entry.value, indent + "  ")
        else:
            text = dump_yaml({entry.key: plain(entry.value)})
            yield from textwrap.indent(text, indent).splitlines()


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
