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
    """A mistake in a good file.

    Args:
        file: Where it is made.
        right: Text of the file that is right.
        wrong: What somebody wrote there instead; the mistake is on the line of ``at`` in it.
        says: What the fix must say.
        fixed: What the fix has written instead of ``wrong``; ``right`` if None: then the fix names it.
        edits: What the fix has written, where that is not in the place of ``wrong``.
        chosen: Words that the fix leaves open, as ``N`` or ``NAME``.
        at: Text of the line that has to be named; the first line of ``wrong`` if None.
        checked: The experiment that is checked, where the mistake is in its DeepSpeed JSON.
        named_in: The file whose line is named, where that is another.
        also: What is found besides by right, by its code, with the reason.
    """

    file: str
    right: str
    wrong: str
    says: str
    fixed: str | None = None
    edits: tuple[Edit, ...] = ()
    chosen: str = ""
    at: str | None = None
    checked: str | None = None
    named_in: str | None = None
    also: dict[str, str] = field(default_factory=dict)

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
    "a key of the library misspelt": in_const(BATCH, "  global_batchsize: 32\n", "'global_batch_size'"),
    "a period misspelt": in_const(
        "    validation_period: {batches: 50}\n",
        "    validation_perod: {batches: 50}\n",
        "'validation_period'",
    ),
    "a unit misspelt": in_const(
        "    max_length: {batches: 200}\n", "    max_length: {batch: 200}\n", "'batches'"
    ),
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
        "    max_length: {batches: 200}\n", "    max_length: 200\n", "{batches: 200}"
    ),
    "no length": in_const(
        "  fit:\n    max_length: {batches: 200}\n", "  fit:\n", "fit: {max_length: {batches: 200}}"
    ),
    "a policy that there is not": in_const(
        "    checkpoint_policy: best\n", "    checkpoint_policy: latest\n", "best"
    ),
    "a negative number of restarts": in_const(RESTARTS, "max_restarts: -1\n", "0", "max_restarts: 0\n"),
    "a size with a unit": in_const(
        SLOTS, SLOTS + "  shm_size: 4GB\n", "4294967296", SLOTS + "  shm_size: 4294967296\n", at="shm_size"
    ),
    "a storage misspelt": in_const(
        RESTARTS,
        "checkpoint_storage: {type: shared-fs, host_path: /data}\n",
        "shared_fs",
        "checkpoint_storage: {type: shared_fs, host_path: /data}\n",
    ),
    "an environment variable as a mapping": in_const(
        RESTARTS,
        "environment:\n  environment_variables:\n    - NCCL_DEBUG: INFO\n",
        "NCCL_DEBUG=INFO",
        "environment:\n  environment_variables:\n    - NCCL_DEBUG=INFO\n",
        at="NCCL_DEBUG: INFO",
    ),
    "a workspace without a project": in_const(
        RESTARTS, "workspace: mine\n", "project: NAME", "workspace: mine\nproject: gpt2\n", chosen="gpt2"
    ),
    # The batch and the ranks
    "a batch that the replicas do not divide": in_const(
        BATCH, "  global_batch_size: 33\n", "32 or 34", "  global_batch_size: 34\n"
    ),
    "more replicas than slots": in_const(
        REPLICAS, "  data_parallel_world_size: 4\n", "2 or auto", "  data_parallel_world_size: 2\n"
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
    "no launcher's trial": in_const(ENTRYPOINT, ENTRYPOINT.replace("GPT2Trial", "GPT2Trail"), "GPT2Trial"),
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
    "a JSON outside the context": in_const(
        JSON_FILE,
        "  deepspeed_config: /etc/ds_config.json\n",
        "relative to the context directory",
        chosen="experiments deepspeed zero1 json",
    ),
    "a JSON in the YAML": in_const(
        JSON_FILE,
        INLINE,
        "{type: const, val: {...}}",
        "  deepspeed_config: {type: const, val: {optimizer: {type: AdamW, params: {lr: auto}}}}\n",
    ),
    # The search
    "a searcher misspelt": in_const("  name: single\n", "  name: singel\n", "single"),
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
    "a time that is not reported": in_search("  time_metric: batches\n", "  time_metric: batch\n", "batches"),
    "a hyperparameter's type misspelt": in_search(LR, LR.replace("log,", "logarithmic,"), "log"),
    "a range the wrong way round": in_search(
        LR,
        LR.replace("minval: -3.5, maxval: -2.0", "minval: -2.0, maxval: -3.5"),
        "a number above -2",
        LR.replace("minval: -3.5, maxval: -2.0", "minval: -2.0, maxval: -1.5"),
        chosen="1 5",
    ),
    "categories that are no list": in_search(
        "{type: categorical, vals: [4, 8, 16]}",
        "{type: categorical, vals: 4}",
        "vals: [4]",
        "{type: categorical, vals: [4]}",
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
    "chunks that a schedule does not have": in_pipeline("  pipe_chunks: 3\n", "leave it out", ""),
    # Names from other documents
    "stages by another name": in_const(
        REPLICAS, "  pipeline_parallel_size: 1\n", "write pipe_parallel_size", "  pipe_parallel_size: 1\n"
    ),
    "a micro-batch by another name": in_const(
        REPLICAS, "  micro_batch_size_per_gpu: 4\n", "write micro_batch_size", "  micro_batch_size: 4\n"
    ),
    "a batch without its meaning": in_const(
        BATCH,
        "  batch_size: 32\n",
        "global_batch_size (samples of an optimizer step",
    ),
    "two names with two values": in_const(
        REPLICAS,
        "  pipe_parallel_size: 1\n  pp_size: 2\n",
        "keep pipe_parallel_size only",
        "  pipe_parallel_size: 1\n",
        at="pp_size",
    ),
    "a stage beside another one": in_const(
        REPLICAS,
        "  zero_stage: 2\n  overwrite_deepspeed_args: {zero_optimization: {stage: 1}}\n",
        "keep one of them: zero_stage stands for",
        "  zero_stage: 2\n",
        at="zero_stage",
    ),
    "a block for the training": in_const(
        RESTARTS,
        "training: {epochs: 3}\n",
        "lengths and periods below hyperparameters.fit",
        edits=(Edit(CONST, "training: {epochs: 3}\n", ""), Edit(CONST, "{batches: 200}", "{epochs: 3}")),
    ),
    "a block for the model": in_const(
        RESTARTS,
        "model: {name: gpt2}\n",
        "as hyperparameters",
        edits=(
            Edit(CONST, "model: {name: gpt2}\n", ""),
            Edit(CONST, "hyperparameters:\n", "hyperparameters:\n  name: gpt2\n"),
        ),
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
    "a section that is not DeepSpeed's": in_zero1(
        CLIPPING,
        '  "gradient_clipping": "auto",\n  "profiling": {"enabled": true},\n',
        "flops_profiler",
        '  "gradient_clipping": "auto",\n  "flops_profiler": {"enabled": true},\n',
        at="profiling",
    ),
    "a switch for a section": in_zero1(
        '  "bf16": {\n    "enabled": "auto"\n  }\n',
        '  "bf16": true\n',
        'write {"enabled": true}',
        '  "bf16": {"enabled": true}\n',
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
    "a rate in two places": Mistake(
        file=ZERO1,
        right='      "lr": "auto",\n',
        wrong='      "lr": 0.1,\n',
        says="remove learning_rate",
        edits=(Edit(CONST, "  learning_rate: 0.003\n", ""),),
        checked=CONST,
        at="learning_rate: 0.003",
        named_in=CONST,
    ),
    "a section of the JSON misspelt": in_zero1('  "optimizer": {\n', '  "optimzer": {\n', "'optimizer'"),
    "a key of ZeRO misspelt": in_zero1(STAGE, '    "stagee": 1\n', "'stage'"),
    "a stage that there is not": in_zero1(STAGE, '    "stage": 4\n', "3", '    "stage": 3\n'),
    "a stage in quotes": in_zero1(STAGE, '    "stage": "1"\n', "remove the quotes: 1"),
    "a comma too many": in_zero1(STAGE, '    "stage": 1,\n', "remove the comma"),
    "a comment in JSON": in_zero1(STAGE, '    "stage": 1 // optimizer state\n', "no comments"),
    "Python's False": in_zero1(
        '    "enabled": "auto"\n', '    "enabled": False\n', "false", '    "enabled": false\n'
    ),
    "two precisions": in_zero1(
        '    "enabled": "auto"\n  }\n',
        '    "enabled": true\n  },\n  "fp16": {"enabled": true}\n',
        "disable one",
        '    "enabled": true\n  },\n  "fp16": {"enabled": false}\n',
        chosen="false",
        at='"fp16"',
    ),
    "parameters offloaded that are not split": in_zero1(
        STAGE,
        '    "stage": 1,\n    "offload_param": {"device": "cpu"}\n',
        "stage to 3",
        '    "stage": 3,\n    "offload_param": {"device": "cpu"}\n',
        at="offload_param",
    ),
    "a device that there is not": in_zero1(
        STAGE,
        '    "stage": 1,\n    "offload_optimizer": {"device": "gpu"}\n',
        '"cpu"',
        '    "stage": 1,\n    "offload_optimizer": {"device": "cpu"}\n',
        at="offload_optimizer",
    ),
    "offload by its old name": in_zero1(
        STAGE,
        '    "stage": 1,\n    "cpu_offload": true\n',
        "offload_optimizer",
        '    "stage": 1,\n    "offload_optimizer": {"device": "cpu"}\n',
        at="cpu_offload",
    ),
    "an optimizer that is gone": in_zero1('    "type": "AdamW",\n', '    "type": "OneBitAdam",\n', "AdamW"),
    "a schedule misspelt": in_zero1('    "type": "WarmupLR",\n', '    "type": "WarmUpLr",\n', "WarmupLR"),
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
    "secondary partitions without ZeRO 3": in_zero1(
        STAGE,
        '    "stage": 1,\n    "zero_hpz_partition_size": 2\n',
        "stage to 3",
        '    "stage": 3,\n    "zero_hpz_partition_size": 2\n',
        at="zero_hpz_partition_size",
    ),
}
