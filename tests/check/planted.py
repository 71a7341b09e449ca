"""Mistakes of the kind that people make and report, each with the line it is on and the fix that is carried out.

A mistake is made in a good file of this repository, by writing one text for another. What is then written is what the
fix says: words of the file that come new with it stand in the fix, but for those that it leaves open.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

CONST = "experiments/gpt2/const.yaml"
SEARCH = "experiments/gpt2/search.yaml"
PIPELINE = "experiments/gpt2/pipeline.yaml"
ZERO1 = "experiments/deepspeed/zero1.json"
ZERO2 = "experiments/deepspeed/zero2.json"
ENTRYPOINT = (
    "entrypoint: python3 -m determined.launch.torch_distributed python3 -m determined_ds.train "
    "model_defs.gpt2.trial:GPT2Trial\n"
)


class Edit(NamedTuple):
    """One text of a file written for another."""

    file: str
    old: str
    new: str


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """A mistake in a good file."""

    file: str  # where it is made
    right: str  # text of it that is right
    wrong: str  # what somebody wrote there instead
    says: str  # what the fix must say
    fixed: str | None = None  # what the fix has written instead of ``wrong``; None: ``right``
    edits: tuple[Edit, ...] = ()  # what the fix has written, where that is not in the place of ``wrong``
    chosen: str = ""  # words that the fix leaves open, as ``N`` or ``NAME``
    at: str | None = None  # text of the line that has to be named; None: the first of ``wrong``
    checked: str | None = None  # the experiment that is checked, where the mistake is in its DeepSpeed JSON
    named_in: str | None = None  # the file whose line is named, where that is another
    also: dict[str, str] = field(
        default_factory=dict
    )  # what is found besides by right, by code, with the reason

    def fix(self) -> tuple[Edit, ...]:
        """What a user writes who carries out the fix."""
        return self.edits or (Edit(self.file, self.wrong, self.right if self.fixed is None else self.fixed),)


def in_const(right: str, wrong: str, says: str, fixed: str | None = None, **more: Any) -> Mistake:
    return Mistake(file=CONST, right=right, wrong=wrong, says=says, fixed=fixed, **more)


def in_search(right: str, wrong: str, says: str, fixed: str | None = None, **more: Any) -> Mistake:
    return Mistake(file=SEARCH, right=right, wrong=wrong, says=says, fixed=fixed, **more)


def in_zero1(right: str, wrong: str, says: str, fixed: str | None = None, **more: Any) -> Mistake:
    return Mistake(file=ZERO1, right=right, wrong=wrong, says=says, fixed=fixed, checked=CONST, **more)


def in_pipeline(wrong: str, says: str, fixed: str) -> Mistake:
    """A line that is added to the hyperparameters of a pipeline."""
    right = "  pipe_parallel_size: 2\n"
    return Mistake(
        file=PIPELINE, right=right, wrong=right + wrong, says=says, fixed=right + fixed, at=wrong.strip()
    )


SLOTS = "  slots_per_trial: 2\n"
STAGE = '    "stage": 1\n'
ASHA = (
    "  time_metric: batches\n  max_time: 200   # == fit.max_length\n"
    "  max_rungs: 2    # judged after 50 and after 200 batches, where it validates\n"
)
REPORTED = "  metric: validation_loss\n  smaller_is_better: true\n"
ASHA_SEARCHER = f"searcher:\n  name: adaptive_asha\n{REPORTED}  max_trials: 16\n{ASHA}"
GRID_SEARCHER = f"searcher:\n  name: grid\n{REPORTED}"
STAGES = "  zero_stage: {type: int, minval: 0, maxval: 3}"
LR = "  learning_rate: {type: log, minval: -3.5, maxval: -2.0, base: 10}\n"
INLINE = "  deepspeed_config: {optimizer: {type: AdamW, params: {lr: auto}}}\n"
REPLICAS = "  data_parallel_world_size: auto\n"
RESTARTS = "max_restarts: 2\n"
BATCH = "  global_batch_size: 32\n"
JSON_FILE = "  deepspeed_config: experiments/deepspeed/zero1.json\n"
CLIPPING = '  "gradient_clipping": "auto",\n'

PLANTED: dict[str, Mistake] = {
    # Keys
    "a section misspelt": in_const(
        "hyperparameters:\n",
        "hyperparamters:\n",
        "'hyperparameters'",
    ),
    "a key of a section misspelt": in_const(SLOTS, "  slot_per_trial: 2\n", "'slots_per_trial'"),
    "the number of slots by another name": in_const(SLOTS, "  slots: 2\n", "slots_per_trial"),
    "a key one level too high": in_const(
        "reproducibility:\n  experiment_seed: 0\n", "experiment_seed: 0\n", "reproducibility.experiment_seed"
    ),
    "a hyperparameter at the top level": in_const(
        "hyperparameters:\n",
        "pipe_parallel_size: 1\nhyperparameters:\n",
        "hyperparameters.pipe_parallel_size",
        "hyperparameters:\n  pipe_parallel_size: 1\n",
    ),
    "a key given twice": in_const(SLOTS, SLOTS + "  slots_per_trial: 4\n", "keep one", SLOTS, at="trial: 4"),
    "indented by a tab": in_const(SLOTS, "\tslots_per_trial: 2\n", "spaces, not tabs"),
    # Values
    "a number in quotes": in_const(SLOTS, '  slots_per_trial: "2"\n', "remove the quotes: 2"),
    "a length without its unit": in_const(
        "    max_length: {batches: 200}\n", "    max_length: 200\n", "{batches: N}"
    ),
    "no length": in_const(
        "  fit:\n    max_length: {batches: 200}\n", "  fit:\n", "fit: {max_length: {batches: 200}}"
    ),
    # The batch and the ranks
    "a batch that the replicas do not divide": in_const(
        BATCH, "  global_batch_size: 33\n", "32 or 34", "  global_batch_size: 34\n"
    ),
    "stages that do not divide the slots": Mistake(
        file=PIPELINE,
        right="  pipe_parallel_size: 2\n",
        wrong="  pipe_parallel_size: 3\n",
        says="use 3 slots, or pipe_parallel_size 2",
        at="slots_per_trial: 2",
    ),
    "stages for a trial that has none": in_const(
        REPLICAS,
        "  pipe_parallel_size: 2\n",
        "pipe_parallel_size to 1",
        "  pipe_parallel_size: 1\n",
        also={"pipeline-bubble": "it stays where a PipelineTrial is named instead"},
    ),
    "a batch stated twice": Mistake(
        file=ZERO1,
        right='  "train_batch_size": "auto",\n',
        wrong='  "train_batch_size": 64,\n',
        says='"auto" for train_batch_size',
        checked=CONST,
        at="global_batch_size: 32",
        named_in=CONST,
    ),
    # The trial
    "the form of old": in_const(
        ENTRYPOINT, "entrypoint: model_defs.gpt2.trial:GPT2Trial\n", "determined_ds.train"
    ),
    "a module that is not there": in_const(
        ENTRYPOINT, ENTRYPOINT.replace("model_defs.gpt2", "model_defs.gpt"), "model_defs.gpt2.trial"
    ),
    "a metric that is not reported": in_const(
        "  metric: validation_loss\n", "  metric: val_loss\n", "validation_loss"
    ),
    "a JSON that is not there": in_const(
        JSON_FILE,
        "  deepspeed_config: experiments/deepspeed/zero-1.json\n",
        "experiments/deepspeed/zero1.json",
    ),
    "a JSON in the YAML": in_const(
        JSON_FILE,
        INLINE,
        "{type: const, val: {...}}",
        "  deepspeed_config: {type: const, val: {optimizer: {type: AdamW, params: {lr: auto}}}}\n",
    ),
    # The search
    "a searcher that is gone": in_search(
        "  name: adaptive_asha\n", "  name: adaptive_simple\n", "adaptive_asha"
    ),
    "a search without its length": in_search(
        "  max_time: 200   # == fit.max_length\n",
        "",
        "write max_time: ",
        edits=(Edit(SEARCH, "  max_rungs:", "  max_time: 200\n  max_rungs:"),),
        chosen="200",
        at="searcher:",
    ),
    "a search longer than the training": in_search("  max_time: 200 ", "  max_time: 400 ", "200"),
    "a range the wrong way round": in_search(
        LR,
        LR.replace("minval: -3.5, maxval: -2.0", "minval: -2.0, maxval: -3.5"),
        "a number above -2",
        LR.replace("minval: -3.5, maxval: -2.0", "minval: -2.0, maxval: -1.5"),
        chosen="1 5",
    ),
    "a grid without counts": in_search(
        ASHA_SEARCHER,
        GRID_SEARCHER,
        "count: N",
        edits=(
            Edit(SEARCH, LR, LR.replace("}", ", count: 3}")),
            Edit(SEARCH, STAGES, STAGES.replace("}", ", count: 4}")),
        ),
        chosen="3 4",
        at="learning_rate:",
        also={"hyperparameter-spec": "zero_stage has no count either"},
    ),
    "values for exponents": in_search(
        LR,
        LR.replace("minval: -3.5, maxval: -2.0", "minval: 0.0001, maxval: 0.01"),
        "minval: -4, maxval: -2",
        LR.replace("minval: -3.5, maxval: -2.0", "minval: -4, maxval: -2"),
    ),
    # The pipeline
    "a schedule's key misspelt": in_pipeline(
        "  pipeline_schedule: gpipe\n", "'pipe_schedule'", "  pipe_schedule: gpipe\n"
    ),
    # Names from other documents
    "a micro-batch by another name": in_const(
        REPLICAS, "  micro_batch_size_per_gpu: 4\n", "write micro_batch_size", "  micro_batch_size: 4\n"
    ),
    "two names with two values": in_const(
        REPLICAS,
        "  pipe_parallel_size: 1\n  pp_size: 2\n",
        "keep pipe_parallel_size only",
        "  pipe_parallel_size: 1\n",
        at="pp_size",
    ),
    "a block for the training": in_const(
        RESTARTS,
        "training: {epochs: 3}\n",
        "lengths and periods below hyperparameters.fit",
        edits=(Edit(CONST, "training: {epochs: 3}\n", ""), Edit(CONST, "{batches: 200}", "{epochs: 3}")),
    ),
    "stages in the JSON": in_zero1(
        CLIPPING,
        '  "gradient_clipping": "auto",\n  "pipeline": {"stages": 1},\n',
        "hyperparameters.pipe_parallel_size",
        edits=(
            Edit(ZERO1, '  "pipeline": {"stages": 1},\n', ""),
            Edit(CONST, "hyperparameters:\n", "hyperparameters:\n  pipe_parallel_size: 1\n"),
        ),
        at="stages",
    ),
    # The DeepSpeed JSON
    "an optimizer that ZeRO refuses": Mistake(
        file=ZERO1,
        right='    "type": "AdamW",\n    "params": {\n      "lr": "auto",\n      "betas": "auto",\n'
        '      "eps": "auto",\n      "weight_decay": "auto"\n',
        wrong='    "type": "SGD",\n    "params": {\n      "lr": "auto"\n',
        says='"zero_allow_untested_optimizer": true',
        edits=(
            Edit(
                ZERO1,
                '  "gradient_clipping"',
                '  "zero_allow_untested_optimizer": true,\n  "gradient_clipping"',
            ),
        ),
        checked=CONST,
    ),
    "a section of the JSON misspelt": in_zero1('  "optimizer": {\n', '  "optimzer": {\n', "'optimizer'"),
    "a comma too many": in_zero1(STAGE, '    "stage": 1,\n', "remove the comma"),
    "parameters offloaded that are not split": in_zero1(
        STAGE,
        '    "stage": 1,\n    "offload_param": {"device": "cpu"}\n',
        "stage to 3",
        '    "stage": 3,\n    "offload_param": {"device": "cpu"}\n',
        at="offload_param",
    ),
    "nothing says the learning rate": Mistake(
        file=CONST,
        right="  learning_rate: 0.003\n",
        wrong="  # learning_rate: 0.003\n",
        says="learning_rate",
        chosen="0 003",
        at='"lr": "auto"',
        named_in=ZERO1,
        also={"auto-undetermined": "warmup_max_lr is left open, too"},
    ),
    "a pipeline under ZeRO 2": Mistake(
        file=PIPELINE,
        right="  deepspeed_config: experiments/deepspeed/pipeline.json\n",
        wrong="  deepspeed_config: experiments/deepspeed/zero2.json\n",
        says="stage to 1",
        edits=(Edit(ZERO2, '"stage": 2', '"stage": 1'),),
        at='"stage": 2',
        named_in=ZERO2,
    ),
}
