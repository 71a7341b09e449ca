"""Plan -> the DeepSpeed JSON and the experiment YAML, with a comment above each choice that says why.

JSON has no comments; its reasons stand in the YAML, above the key that names it.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from determined_ds.config.deepspeed.create import create_deepspeed_config, create_offload_config
from determined_ds.documents.reading import dump_yaml
from determined_ds.experiment.experiment import ENTRYPOINT_FORM
from determined_ds.memory import format_bytes, format_count
from determined_ds.memory.plan.choose import Plan
from determined_ds.task_log import LOG_POLICIES

GPT2 = "model_defs.gpt2.trial:GPT2Trial"
GPT2_PIPELINE = "model_defs.gpt2.trial:GPT2PipelineTrial"
# Parameters of the sizes that this GPT-2 comes in; model_defs knows them by these names.
GPT2_SIZES = {"tiny": 843e3, "small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
ALIKE = 1.15  # as a ratio of sizes

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

KEPT_IN_JSON = ("zero_optimization.stage", "offload", "precision", "train_micro_batch_size_per_gpu")


@dataclass(frozen=True, kw_only=True)
class GeneratedFiles:
    """The pair of files, not yet written.

    Args:
        ds_config: The DeepSpeed JSON.
        experiment: The text of the experiment YAML.
        notes: What the user should know that no file can fix.
    """

    ds_config: dict[str, Any]
    experiment: str
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """A key of the YAML with what is said above it; the value may be entries again."""

    key: str
    value: Any
    why: tuple[str, ...] = ()


def default_name(plan: Plan) -> str:
    """E.g. ``6b_zero1_32gpu``; the files are called so, and the experiment."""
    strategy = plan.strategy
    words = [format_count(plan.needs.shape.num_parameters).lower()]
    if strategy.pipe_parallel_size > 1:
        words.append(f"pipeline{strategy.pipe_parallel_size}")
    words.append(f"zero{strategy.zero_stage}")
    if strategy.offload_optimizer:
        words.append("nvme" if plan.needs.offload == "nvme" else "offload")
    return "_".join([*words, f"{plan.needs.gpus}gpu"])


def files_of(plan: Plan, *, name: str, trial: str, ds_config_path: str) -> GeneratedFiles:
    """The pair of files that carry a plan out.

    Args:
        plan: What was chosen.
        name: Of the experiment.
        trial: ``MODULE:CLASS``; GPT-2's get the hyperparameters that it reads.
        ds_config_path: Of the DeepSpeed JSON, as the YAML is to name it: inside the context directory.
    """
    return GeneratedFiles(
        ds_config=_ds_config(plan),
        experiment=_experiment(plan, name, trial, ds_config_path),
        notes=tuple(_notes(plan, trial)),
    )


def _ds_config(plan: Plan) -> dict[str, Any]:
    needs, strategy = plan.needs, plan.strategy
    offload = None
    if strategy.offload_optimizer:
        nvme = needs.offload == "nvme"
        offload = create_offload_config("nvme" if nvme else "cpu", nvme_path=needs.nvme_path or None)
    return create_deepspeed_config(
        zero_stage=strategy.zero_stage,
        micro_batch_size=strategy.micro_batch_size,
        precision=needs.precision,  # type: ignore[arg-type]
        offload_optimizer=offload,
        offload_param=offload if strategy.offload_param else None,
        contiguous_gradients=strategy.overlap_comm,
        overlap_comm=strategy.overlap_comm,
        stage3_gather_16bit_weights_on_model_save=True if strategy.zero_stage == 3 else None,
        grad_accum_dtype=strategy.grad_accum_dtype,  # type: ignore[arg-type]
    )


def _notes(plan: Plan, trial: str) -> Iterator[str]:
    if trial in (GPT2, GPT2_PIPELINE) and not _is_gpt2(plan):
        size = format_count(plan.needs.shape.num_parameters)
        yield (
            f"there is no GPT-2 of {size}: {trial} with model_size {_gpt2_size(plan)} stands in for your model; "
            "name your own by --entrypoint MODULE:TRIAL"
        )
    if plan.strategy.activation_checkpointing and trial not in (GPT2, GPT2_PIPELINE):  # which read it
        yield (
            "activation checkpointing is the model's to do: the trial must turn it on where"
            " hyperparameters.activation_checkpointing is true"
        )


def _gpt2_size(plan: Plan) -> str:
    wanted = plan.needs.shape.num_parameters
    return min(GPT2_SIZES, key=lambda size: abs(math.log(GPT2_SIZES[size] / wanted)))


def _is_gpt2(plan: Plan) -> bool:
    ratio = plan.needs.shape.num_parameters / GPT2_SIZES[_gpt2_size(plan)]
    return 1 / ALIKE <= ratio <= ALIKE


# ----------------------------------------------------------------------------------------------------- the YAML


def _experiment(plan: Plan, name: str, trial: str, ds_config_path: str) -> str:
    needs, strategy = plan.needs, plan.strategy
    pipeline = f"a pipeline of {strategy.pipe_parallel_size}, " if strategy.pipe_parallel_size > 1 else ""
    tokens = needs.global_batch_size * needs.shape.sequence_length
    head = (
        f"Written by det-ds generate for {format_count(needs.shape.num_parameters)} parameters on {needs.gpus} x"
        f" {format_bytes(needs.gpu_memory_bytes)}, {needs.global_batch_size} samples of {needs.shape.sequence_length}"
        f" tokens a step. Bytes are estimates; for them the model was taken to have {needs.shape.num_layers} layers of"
        f" width {needs.shape.hidden_size} and a vocabulary of {needs.shape.vocab_size}."
    )
    entries = [
        _Entry(key="name", value=name),
        _Entry(key="description", value=f"{pipeline}ZeRO {strategy.zero_stage} on {needs.gpus} GPUs"),
        _Entry(key="entrypoint", value=ENTRYPOINT_FORM.replace(GPT2, trial)),
        _Entry(
            key="resources",
            value=[_Entry(key="slots_per_trial", value=needs.gpus, why=("One rank a GPU.",))],
        ),
        _Entry(
            key="hyperparameters",
            value=[*_library_entries(plan, trial, ds_config_path), *_model_entries(plan, trial, tokens)],
        ),
    ]
    if trial in (GPT2, GPT2_PIPELINE):
        why = "Without a path: Python's own source, as bytes. Else a file or folder of text, JSON lines or parquet."
        data = {"path": None, "tokenizer": None}
        entries.append(_Entry(key="data", value=data, why=(why,)))
    searcher = {"name": "single", "metric": "validation_loss", "smaller_is_better": True}
    entries += [
        _Entry(key="searcher", value=searcher),
        _Entry(key="reproducibility", value={"experiment_seed": 0}),
        _Entry(key="max_restarts", value=2),
        _Entry(key="labels", value=("deepspeed", f"zero{strategy.zero_stage}")),
        _Entry(
            key="log_policies", value=LOG_POLICIES, why=("What another start cannot help ends at the first.",)
        ),
    ]
    return "\n".join([*_comment(head, ""), *_lines(entries, "")]) + "\n"


def _library_entries(plan: Plan, trial: str, ds_config_path: str) -> Iterator[_Entry]:
    strategy = plan.strategy

    def why(key: str) -> str:
        choice = plan.choice(key)
        return f"{choice.key} {choice.value}: {choice.reason}."

    yield _Entry(
        key="global_batch_size",
        value=plan.needs.global_batch_size,
        why=(why("gradient_accumulation_steps"),),
    )
    yield _Entry(key="data_parallel_world_size", value="auto")
    yield _Entry(
        key="pipe_parallel_size", value=strategy.pipe_parallel_size, why=(why("pipe_parallel_size"),)
    )
    yield _Entry(
        key="deepspeed_config",
        value=ds_config_path,
        why=("Why the JSON says what it says:", *(why(key) for key in KEPT_IN_JSON)),
    )
    own = "The trial has to read it: what is computed twice is the model's to say, not DeepSpeed's."
    yield _Entry(
        key="activation_checkpointing",
        value=strategy.activation_checkpointing,
        why=(why("activation_checkpointing"), *(() if trial in (GPT2, GPT2_PIPELINE) else (own,))),
    )
    period = {"validation_period": BATCHES // 10, "checkpoint_period": BATCHES // 2, "reporting_period": 10}
    fit = {key: {"batches": value} for key, value in {"max_length": BATCHES, **period}.items()}
    yield _Entry(key="fit", value={**fit, "checkpoint_policy": "best"}, why=(_length(plan),))


def _length(plan: Plan) -> str:
    needs = plan.needs
    tokens = needs.global_batch_size * needs.shape.sequence_length
    enough = -(-TOKENS_A_PARAMETER * needs.shape.num_parameters // tokens)
    return (
        f"A first look. {TOKENS_A_PARAMETER} tokens a parameter, as many as such a model is worth training on (arXiv"
        f" 2203.15556), are {enough:,} batches of {tokens:,} tokens."
    )


def _model_entries(plan: Plan, trial: str, tokens: int) -> Iterator[_Entry]:
    parameters = plan.needs.shape.num_parameters
    if trial in (GPT2, GPT2_PIPELINE):
        stand_in = (
            "The nearest that there is, in the place of your model, which the plan is made for."
            if not _is_gpt2(plan)
            else f"The GPT-2 of {format_count(parameters)}."
        )
        yield _Entry(key="model_size", value=_gpt2_size(plan), why=(stand_in,))
        yield _Entry(key="dropout", value=0.0)
    yield _Entry(key="sequence_length", value=plan.needs.shape.sequence_length)
    size, rate = min(LEARNING_RATES, key=lambda row: abs(math.log(row[0] / parameters)))
    why = f"As GPT-3's model of {format_count(int(size))} was trained (arXiv 2005.14165, table 2.1); so the decay."
    yield _Entry(key="learning_rate", value=rate, why=(why,))
    yield _Entry(key="weight_decay", value=WEIGHT_DECAY)
    warmup = f"{WARMUP_BATCHES * tokens:,} tokens, a tenth of the first look."
    yield _Entry(key="warmup_num_steps", value=WARMUP_BATCHES, why=(warmup,))


def _lines(entries: list[_Entry], indent: str) -> Iterator[str]:
    for entry in entries:
        for why in entry.why:
            yield from _comment(why, indent)
        if isinstance(entry.value, list):
            yield f"{indent}{entry.key}:"
            yield from _lines(entry.value, indent + "  ")
        else:
            text = dump_yaml({entry.key: _plain(entry.value)})
            yield from textwrap.indent(text, indent).splitlines()


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return dict(value) if isinstance(value, Mapping) else value


def _comment(text: str, indent: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=f"{indent}# ",
        subsequent_indent=f"{indent}#   ",
        break_long_words=False,
        break_on_hyphens=False,
    )
