"""The mistakes that people make: each is refused with exit 2 and one message with its fix, and no traceback.

Most are found before a rank is started. They run in this process, where a start of ranks fails the test.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from determined_ds.cli.main import main
from determined_ds.errors import EXIT_CONFIG
from tests.command import ROOT, det_ds

LAUNCH = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train"
OWN_MODELS = LAUNCH.replace("torch_distributed", "deepspeed")
EXPERIMENT, JSON, TRIAL = "experiment.yaml", "ds.json", "trial.py"
RUN = (EXPERIMENT, ".")

Edit = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Mistake:
    """One mistake, made in a copy of ``own_model``.

    Args:
        edits: What is done to the context directory first.
        arguments: Of ``det-ds run``, started in the context directory.
        says: What the message must contain: the key or file at fault, its value, what is wrong with it.
        fix: What it must advise.
        num_errors: Errors that are named; all that is wrong is said at once.
    """

    edits: tuple[Edit, ...] = ()
    arguments: tuple[str, ...] = RUN
    says: tuple[str, ...]
    fix: str
    num_errors: int = 1


def written(name: str, content: str | bytes) -> Edit:
    """A file with other content."""
    data = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(data)


def replaced(name: str, old: str, new: str) -> Edit:
    """A file with one passage changed."""

    def edit(folder: Path) -> None:
        text = (folder / name).read_text()
        assert text.count(old) == 1, (name, old)
        (folder / name).write_text(text.replace(old, new))

    return edit


def yaml(old: str, new: str) -> tuple[Edit, ...]:
    return (replaced(EXPERIMENT, old, new),)


def json(old: str, new: str) -> tuple[Edit, ...]:
    return (replaced(JSON, old, new),)


def setting(*overrides: str) -> tuple[str, ...]:
    return (*RUN, *(word for override in overrides for word in ("--set", override)))


def overwriting(**sections: str) -> tuple[str, ...]:
    return setting(*(f"hyperparameters.overwrite_deepspeed_args.{k}={v}" for k, v in sections.items()))


def complete_checkpoint(run_dir: str) -> Edit:
    def edit(folder: Path) -> None:
        path = folder / run_dir / "checkpoints" / "11111111-2222-3333-4444-555555555555"
        path.mkdir(parents=True)
        (path / "metadata.json").write_text('{"steps_completed": 7}')

    return edit


def without_entrypoint(folder: Path) -> None:
    lines = (folder / EXPERIMENT).read_text().splitlines(keepends=True)
    (folder / EXPERIMENT).write_text("".join(line for line in lines if not line.startswith("entrypoint")))


def linked_out(folder: Path) -> None:
    outside = folder.parent / "outside.json"
    shutil.copy(folder / JSON, outside)
    (folder / "link.json").symlink_to(outside)


COMMAND_LINE = {
    "no-config": Mistake(arguments=(), says=("Missing argument 'CONFIG'",), fix="det-ds run --help"),
    "unknown-option": Mistake(
        arguments=(*RUN, "--slot", "2"), says=("No such option", "--slot"), fix="--slots"
    ),
    "config-missing": Mistake(
        arguments=("experiments.yaml", "."), says=("experiments.yaml", "no such file"), fix=EXPERIMENT
    ),
    "config-is-a-folder": Mistake(
        arguments=(".", "."), says=("is a folder, not a file",), fix=f"there are: {JSON}, {EXPERIMENT}"
    ),
    "arguments-swapped": Mistake(
        arguments=(".", EXPERIMENT), says=("CONFIG = '.'",), fix=f"det-ds run {EXPERIMENT} ."
    ),
    "context-missing": Mistake(
        arguments=(EXPERIMENT, "model"),
        says=("CONTEXT_DIR = 'model'", "no such folder"),
        fix="folder that holds",
    ),
    "context-is-a-file": Mistake(
        arguments=(EXPERIMENT, TRIAL),
        says=(f"CONTEXT_DIR = '{TRIAL}'", "is a file"),
        fix="folder that holds",
    ),
    "both-missing": Mistake(
        arguments=("a.yaml", "b"),
        says=("a.yaml", "CONTEXT_DIR = 'b'"),
        fix="folder that holds",
        num_errors=2,
    ),
    "set-without-equals": Mistake(
        arguments=setting("hyperparameters.global_batch_size"),
        says=("--set hyperparameters.global_batch_size", "is not KEY=VALUE"),
        fix="hyperparameters.fit.max_length.batches=10",
    ),
    "set-without-key": Mistake(arguments=setting("=8"), says=("--set =8", "not KEY=VALUE"), fix="write e.g."),
    "set-of-broken-yaml": Mistake(
        arguments=setting("name=[a"), says=("--set name", "is not YAML"), fix="fix the YAML"
    ),
    "set-unknown-key": Mistake(
        arguments=setting("resource.slots_per_trial=2"), says=("resource", "unknown key"), fix="'resources'"
    ),
    "option-by-another-name": Mistake(
        arguments=(*RUN, "--num_gpus", "2"), says=("No such option", "--num-gpus"), fix="Write --slots"
    ),
    "slots-zero": Mistake(
        arguments=(*RUN, "--slots", "0"),
        says=("resources.slots_per_trial = 0 (--slots)", "must be 1 or more"),
        fix="number of devices",
    ),
    "slots-negative": Mistake(
        arguments=(*RUN, "--slots", "-2"), says=("slots_per_trial = -2 (--slots)",), fix="number of devices"
    ),
    "slots-no-number": Mistake(
        arguments=(*RUN, "--slots", "abc"), says=("'--slots'", "'abc'"), fix="det-ds run --help"
    ),
    "slots-do-not-divide-into-stages": Mistake(
        arguments=(*setting("hyperparameters.pipe_parallel_size=2"), "--slots", "3"),
        says=("slots_per_trial = 3 (--slots)", "does not divide"),
        fix="use 2 or 4 slots",
    ),
    "more-ranks-than-devices": Mistake(
        arguments=(*setting("hyperparameters.global_batch_size=65536"), "--slots", "65536"),
        says=("slots_per_trial = 65536 (--slots)", "devices"),
        fix="or fewer",
    ),
    "accelerator-unknown": Mistake(
        arguments=(*RUN, "--accelerator", "tpu"), says=("'--accelerator'", "'tpu'"), fix="'cpu', 'cuda'"
    ),
    "accelerator-absent": Mistake(
        arguments=(*RUN, "--accelerator", "cuda"),
        says=("accelerator = 'cuda'", "no CUDA"),
        fix="--accelerator cpu",
    ),
    "resume-of-what": Mistake(
        arguments=(*RUN, "--resume"), says=("--resume", "--run-dir"), fix="add the --run-dir"
    ),
    "resume-of-what-there-is": Mistake(
        edits=(complete_checkpoint("runs/tiny/20260101-000000"),),
        arguments=(*RUN, "--resume"),
        says=("--resume", "--run-dir"),
        fix="add --run-dir runs/tiny/20260101-000000",
    ),
    "resume-without-checkpoint": Mistake(
        arguments=(*RUN, "--resume", "--run-dir", "empty"),
        says=("--run-dir = 'empty'", "no complete checkpoint"),
        fix="without --resume",
    ),
    "run-dir-holds-a-run": Mistake(
        edits=(complete_checkpoint("earlier"),),
        arguments=(*RUN, "--run-dir", "earlier"),
        says=("--run-dir = 'earlier'", "holds a run already, trained to batch 7"),
        fix="--resume",
    ),
    "run-dir-is-a-file": Mistake(
        arguments=(*RUN, "--run-dir", TRIAL),
        says=(f"--run-dir = '{TRIAL}'", "is a file"),
        fix="can be written to",
    ),
    "run-dir-below-a-file": Mistake(
        arguments=(*RUN, "--run-dir", f"{TRIAL}/run"), says=("is a file",), fix="can be written to"
    ),
}

YAML = {
    "unparsable": Mistake(
        edits=yaml("{batches: 6}", "{batches: 6"),
        says=(f"{EXPERIMENT}:1", "is not YAML"),
        fix="fix the YAML",
    ),
    "not-utf-8": Mistake(
        edits=(written(EXPERIMENT, b"name: \xff\xfe"),),
        says=(EXPERIMENT, "not UTF-8"),
        fix="save it as UTF-8",
    ),
    "empty": Mistake(edits=(written(EXPERIMENT, ""),), says=(EXPERIMENT, "is empty"), fix="write"),
    "a-list": Mistake(
        edits=(written(EXPERIMENT, "- name: tiny\n"),),
        says=(EXPERIMENT, "is not a mapping"),
        fix="name: ...",
    ),
    "duplicate-key": Mistake(
        edits=yaml("  deepspeed_config", "  global_batch_size: 16\n  deepspeed_config"),
        says=("hyperparameters.global_batch_size", "given twice, on lines 6 and 7"),
        fix="keep one",
    ),
    "unknown-key": Mistake(
        edits=yaml("hyperparameters:", "hyperparameter:"),
        says=(f"hyperparameter ({EXPERIMENT}:5)", "unknown key"),
        fix="'hyperparameters'",
    ),
    "unknown-key-of-resources": Mistake(
        edits=yaml("slots_per_trial", "slot_per_trial"),
        says=("resources.slot_per_trial", "unknown key"),
        fix="'slots_per_trial'",
    ),
    "unknown-searcher": Mistake(
        edits=yaml("name: single", "name: asha"), says=("searcher.name = 'asha'",), fix="adaptive_asha"
    ),
    "negative-seed": Mistake(
        arguments=setting("reproducibility.experiment_seed=-1"),
        says=("experiment_seed = -1",),
        fix="seed >= 0",
    ),
    "half-a-search": Mistake(
        arguments=setting("hyperparameters.learning_rate={type: log, minval: -4}"),
        says=("hyperparameters.learning_rate", "log"),
        fix="maxval",
    ),
    "quoted-number": Mistake(
        edits=yaml("global_batch_size: 8", 'global_batch_size: "8"'),
        says=(f"global_batch_size = '8' ({EXPERIMENT}:6)", "must be an integer, not a string"),
        fix="remove the quotes: 8",
    ),
    "true-for-a-number": Mistake(
        edits=yaml("global_batch_size: 8", "global_batch_size: true"),
        says=("global_batch_size = true", "must be an integer"),
        fix="write an integer",
    ),
    "half-a-sample": Mistake(
        edits=yaml("global_batch_size: 8", "global_batch_size: 8.5"), says=("= 8.5",), fix="write an integer"
    ),
    "batch-zero": Mistake(
        edits=yaml("global_batch_size: 8", "global_batch_size: 0"),
        says=("global_batch_size = 0", "must be 1 or more"),
        fix="positive",
    ),
    "batch-negative": Mistake(
        edits=yaml("global_batch_size: 8", "global_batch_size: -8"), says=("= -8",), fix="positive"
    ),
    "batch-missing": Mistake(
        edits=yaml("  global_batch_size: 8\n", ""),
        says=("hyperparameters.global_batch_size", "missing"),
        fix="state global_batch_size",
    ),
    "batch-does-not-divide": Mistake(
        edits=yaml("global_batch_size: 8", "global_batch_size: 9"),
        says=(f"global_batch_size = 9 ({EXPERIMENT}:6)", "is not a multiple of"),
        fix="global_batch_size 8 or 10",
    ),
    "slots-do-not-divide-batch": Mistake(
        arguments=(*RUN, "--slots", "3"), says=("global_batch_size = 8", "3 slots"), fix="6 or 9"
    ),
    "replicas-that-are-not-there": Mistake(
        arguments=setting("hyperparameters.data_parallel_world_size=4"),
        says=("data_parallel_world_size = 4", "make 2 replicas"),
        fix="write 2 or auto, or use 4 slots",
    ),
    "misspelt-hyperparameter": Mistake(
        edits=yaml("global_batch_size", "global_batchsize"),
        says=("hyperparameters.global_batchsize", "unknown key"),
        fix="'global_batch_size'",
    ),
    "length-missing": Mistake(
        edits=yaml("    max_length: {batches: 6}\n", ""),
        says=("hyperparameters.fit.max_length", "missing"),
        fix="fit: {max_length: {batches: 200}}",
    ),
    "length-in-batches-and-epochs": Mistake(
        arguments=setting("hyperparameters.fit.max_length.epochs=1"),
        says=("fit.max_length", "both batches and epochs"),
        fix="max_length.batches=null",
    ),
    "length-in-steps": Mistake(
        edits=yaml("max_length: {batches: 6}", "max_length: {batch: 6}"),
        says=("fit.max_length.batch", "unknown key"),
        fix="'batches'",
    ),
    "length-without-unit": Mistake(
        edits=yaml("max_length: {batches: 6}", "max_length: 6"),
        says=("fit.max_length = 6",),
        fix="{batches: 6}",
    ),
    "length-zero": Mistake(
        edits=yaml("max_length: {batches: 6}", "max_length: {batches: 0}"),
        says=("fit.max_length.batches = 0", "must be 1 or more"),
        fix="positive",
    ),
    "unknown-argument-of-fit": Mistake(
        edits=yaml("validation_period", "validate_period"),
        says=("fit.validate_period", "unknown key"),
        fix="'validation_period'",
    ),
    "unknown-policy": Mistake(
        edits=yaml("checkpoint_policy: best", "checkpoint_policy: last"),
        says=("fit.checkpoint_policy = 'last'",),
        fix="best, all, none",
    ),
    "two-mistakes": Mistake(
        arguments=(*setting("hyperparameters.fit.max_length=null"), "--slots", "3", "--run-dir", TRIAL),
        says=("fit.max_length", "global_batch_size = 8", "--run-dir"),
        fix="6 or 9",
        num_errors=3,
    ),
}

ENTRYPOINT = {
    "missing": Mistake(edits=(without_entrypoint,), says=("entrypoint", "missing"), fix=LAUNCH),
    "a-class": Mistake(
        edits=yaml(f"{OWN_MODELS} trial:TinyTrial", "trial:TinyTrial"),
        says=("entrypoint", "deprecated"),
        fix=LAUNCH,
    ),
    "another-script": Mistake(
        edits=yaml(f"{OWN_MODELS} trial:TinyTrial", "python3 train.py"),
        says=("entrypoint", "does not run determined_ds.train"),
        fix=LAUNCH,
    ),
    "misspelt-module": Mistake(
        edits=yaml("trial:TinyTrial", "trail:TinyTrial"),
        says=("trail:TinyTrial", "no module trail", f"{EXPERIMENT}:2"),
        fix="did you mean trial?",
    ),
    "misspelt-class": Mistake(
        edits=yaml("trial:TinyTrial", "trial:TinyTrail"),
        says=("trial:TinyTrail", "has no TinyTrail"),
        fix="did you mean TinyTrial?",
    ),
    "a-file": Mistake(
        edits=yaml("trial:TinyTrial", "trial.py:TinyTrial"),
        says=("no module trial.py",),
        fix="did you mean trial?",
    ),
    "syntax-error": Mistake(
        edits=(replaced(TRIAL, "class TinyTrial(DataParallelTrial):", "class TinyTrial(DataParallelTrial)"),),
        says=("entrypoint", f"{TRIAL}:18 is not Python", "expected ':'"),
        fix=f"fix {TRIAL}:18",
    ),
    "trial-imports-from-where-it-is-not": Mistake(
        edits=(
            replaced(
                TRIAL, "import torch\n", "import torch\nfrom determined.pytorch import DeepSpeedTrial\n"
            ),
        ),
        says=(f"{TRIAL}:8", "determined.pytorch has no DeepSpeedTrial"),
        fix="from determined.pytorch.deepspeed import DeepSpeedTrial",
    ),
    "trial-with-an-optimizer-that-zero-refuses": Mistake(
        edits=(
            replaced(
                TRIAL,
                "    def build_training",
                "    def build_optimizer(self, model: Any) -> Any:\n"
                "        return torch.optim.SGD(model.parameters(), lr=0.1)\n\n    def build_training",
            ),
        ),
        arguments=overwriting(zero_optimization="{stage: 1}"),
        says=(f"{TRIAL}:29", "returns torch.optim.SGD, and ZeRO stage 1"),
        fix='"zero_allow_untested_optimizer": true',
    ),
    "not-python": Mistake(
        edits=(written(TRIAL, b"\x00\x01"),),
        says=("entrypoint", f"{TRIAL} is not Python"),
        fix=f"fix {TRIAL}",
    ),
}

DEEPSPEED_JSON = {
    "missing": Mistake(
        edits=yaml("ds.json", "zero1.json"),
        says=("deepspeed_config = 'zero1.json'", "no such file in the context directory"),
        fix=f"there are: {JSON}",
    ),
    "absolute": Mistake(
        edits=(
            linked_out,
            lambda folder: yaml("ds.json", str(folder.parent / "outside.json"))[0](folder),
        ),
        says=("deepspeed_config", "outside the context directory"),
        fix="move it inside",
    ),
    "above": Mistake(
        edits=(linked_out, *yaml("ds.json", "../outside.json")),
        says=("deepspeed_config = '../outside.json'", "outside the context directory"),
        fix="move it inside",
    ),
    "linked-out": Mistake(
        edits=(linked_out, *yaml("ds.json", "link.json")),
        says=("deepspeed_config = 'link.json'", "outside the context directory"),
        fix="move it inside",
    ),
    "a-folder": Mistake(
        edits=(lambda folder: (folder / "ds").mkdir(), *yaml("ds.json", "ds")),
        says=("deepspeed_config = 'ds'", "is not a file"),
        fix=f"there are: {JSON}",
    ),
    "a-number": Mistake(
        edits=yaml("ds.json", "1"), says=("deepspeed_config = 1", "a path or a mapping"), fix="write a path"
    ),
    "trailing-comma": Mistake(
        edits=json('"stage": 1', '"stage": 1,'), says=(f"{JSON}:6", "is not JSON"), fix="remove the comma"
    ),
    "comment": Mistake(
        edits=json('"stage": 1', '"stage": 1 // sharded'),
        says=(f"{JSON}:6", "is not JSON"),
        fix="no comments",
    ),
    "a-list": Mistake(edits=(written(JSON, "[]"),), says=(JSON, "is not a JSON object"), fix='"{"'),
    "not-a-number": Mistake(edits=json("0.01", "NaN"), says=(JSON, "NaN"), fix="finite"),
    "duplicate-key": Mistake(
        edits=json('"stage": 1', '"stage": 1,\n    "stage": 2'),
        says=("zero_optimization.stage", "given twice, on lines 6 and 7"),
        fix="keep one",
    ),
    "unknown-key": Mistake(
        edits=json('"zero_optimization"', '"zero_optimisation"'),
        says=(f"zero_optimisation ({JSON}:5)", "unknown key"),
        fix="'zero_optimization'",
    ),
    "unknown-key-below": Mistake(
        edits=json('"stage"', '"zero_stage"'), says=("zero_optimization.zero_stage",), fix="stage"
    ),
    "quoted-number": Mistake(
        edits=json('"stage": 1', '"stage": "1"'),
        says=(f"zero_optimization.stage = '1' ({JSON}:6)", "must be an integer"),
        fix="remove the quotes: 1",
    ),
    "stage-four": Mistake(
        edits=json('"stage": 1', '"stage": 4'), says=("zero_optimization.stage = 4",), fix="use 0, 1, 2, 3"
    ),
    "micro-batch-zero": Mistake(
        edits=json('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 0'),
        says=(f"train_micro_batch_size_per_gpu = 0 ({JSON}:3)",),
        fix="above 0",
    ),
    "micro-batch-does-not-divide": Mistake(
        edits=json('"train_micro_batch_size_per_gpu": "auto"', '"train_micro_batch_size_per_gpu": 3'),
        says=("global_batch_size = 8", "train_micro_batch_size_per_gpu 3"),
        fix="6 or 12",
    ),
    "batch-stated-twice": Mistake(
        edits=json('"train_batch_size": "auto"', '"train_batch_size": 16'),
        says=("global_batch_size = 8", "train_batch_size = 16", f"{JSON}:2"),
        fix="auto",
    ),
    "embedded-unknown-key": Mistake(
        edits=yaml("deepspeed_config: ds.json", "deepspeed_config: {zero_optimisation: {stage: 1}}"),
        says=(f"zero_optimisation ({EXPERIMENT}:7)", "unknown key"),
        fix="'zero_optimization'",
    ),
}

NAMES_AND_NEEDS = {
    "monitor-without-its-package": Mistake(
        arguments=overwriting(wandb="{enabled: true}"),
        says=("wandb.enabled = true", "needs the package wandb, which is not installed"),
        fix="pip install 'wandb'",
    ),
    "contiguous-checkpoints": Mistake(
        arguments=overwriting(activation_checkpointing="{contiguous_memory_optimization: true}"),
        says=("activation_checkpointing.contiguous_memory_optimization = true", "needs number_checkpoints"),
        fix="number_checkpoints: N",
    ),
    "two-names-with-two-values": Mistake(
        arguments=setting("hyperparameters.pipe_parallel_size=1", "hyperparameters.pipeline_parallel_size=2"),
        says=("hyperparameters.pipeline_parallel_size = 2", "another name of pipe_parallel_size, which is 1"),
        fix="keep pipe_parallel_size only",
    ),
    "a-name-that-models-have": Mistake(
        arguments=setting("hyperparameters.num_stages=2"),
        says=("hyperparameters.num_stages = 2", "is not read by this library"),
        fix="state pipe_parallel_size: 1 beside it",
    ),
    "stages-in-the-json": Mistake(
        arguments=overwriting(pipeline="{stages: 2}"),
        says=("pipeline.stages = 2", "is not read by DeepSpeed"),
        fix="hyperparameters.pipe_parallel_size",
    ),
}

TOGETHER = {
    "pipeline-with-zero2": Mistake(
        arguments=setting(
            "hyperparameters.pipe_parallel_size=2",
            "hyperparameters.overwrite_deepspeed_args.zero_optimization.stage=2",
        ),
        says=("zero_optimization.stage = 2 (--set", "pipe_parallel_size 2"),
        fix="set zero_optimization.stage to 1",
    ),
    "parameters-offloaded-with-zero1": Mistake(
        arguments=overwriting(zero_optimization="{offload_param: {device: cpu}}"),
        says=("zero_optimization.offload_param", "stage 3, not 1"),
        fix="to 3, or remove offload_param",
    ),
    "zeropp-on-cpu": Mistake(
        arguments=overwriting(zero_optimization="{stage: 3, zero_quantized_weights: true}"),
        says=("zero_optimization.zero_quantized_weights = true", "CUDA"),
        fix="run it on GPUs",
    ),
    "one-bit-adam-on-cpu": Mistake(
        arguments=overwriting(optimizer="{type: const, val: {type: OneBitAdam}}"),
        says=("optimizer.type = 'OneBitAdam'",),
        fix="AdamW",
    ),
}


ALL = {
    f"{kind}/{name}": mistake
    for kind, mistakes in {
        "command-line": COMMAND_LINE,
        "yaml": YAML,
        "entrypoint": ENTRYPOINT,
        "json": DEEPSPEED_JSON,
        "names-and-needs": NAMES_AND_NEEDS,
        "together": TOGETHER,
    }.items()
    for name, mistake in mistakes.items()
}


@pytest.fixture
def no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A start of ranks fails the test; there is no GPU."""

    def refuse(*_: Any, **__: Any) -> int:
        raise AssertionError("ranks were started")

    monkeypatch.setattr("determined_ds.launch.local_run.run_ranks", refuse)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)


def run_here(*arguments: str) -> Result:
    """``det-ds run`` in this process; an ``--accelerator`` among the arguments wins over the CPU."""
    words = ["run", "--accelerator", "cpu", *arguments]
    return CliRunner().invoke(main, words, prog_name="det-ds")


def files_in(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("mistake", [pytest.param(mistake, id=name) for name, mistake in ALL.items()])
def test_refused_before_a_rank_is_started(
    mistake: Mistake, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    for edit in mistake.edits:
        edit(own_model)
    before = files_in(own_model)

    result = run_here(*mistake.arguments)

    assert result.exit_code == EXIT_CONFIG, result.output
    assert result.stdout == ""
    for words in (*mistake.says, mistake.fix):
        assert words in result.stderr
    assert len(re.findall(r"^error: ", result.stderr, flags=re.I | re.M)) == mistake.num_errors, result.stderr
    assert "Traceback" not in result.stderr
    assert files_in(own_model) == before, "a refused run leaves nothing"


@pytest.mark.usefixtures("no_launch")
def test_the_model_of_the_mistakes_is_none_itself(own_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(own_model)
    result = run_here(*RUN)
    assert isinstance(result.exception, AssertionError)
    assert "ranks were started" in str(result.exception)


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize("when", ["known", "tried"])
def test_a_run_dir_that_cannot_be_written_to(
    when: str, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    if when == "known":
        monkeypatch.setattr(os, "access", lambda _, mode, **__: not mode & os.W_OK)
    else:  # permission is one thing; a full or broken disk shows only in the attempt

        def refuse(*_: Any, **__: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(Path, "mkdir", refuse)
    result = run_here(*RUN, "--run-dir", "new/run")
    assert result.exit_code == EXIT_CONFIG, result.output
    assert "--run-dir = 'new/run'" in result.stderr
    assert "give a --run-dir that can be written to" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("no_launch")
@pytest.mark.parametrize(
    "definition",
    [
        "from elsewhere import TinyTrial",
        "from elsewhere import *",
        "import elsewhere\n\nTinyTrial = elsewhere.make()",
        "try:\n    import torch\nexcept ImportError:\n    raise\nelse:\n    class TinyTrial:\n        ...",
        "def __getattr__(name):\n    return object",
    ],
)
def test_a_trial_that_may_be_there_is_left_to_the_ranks(
    definition: str, own_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own_model)
    (own_model / TRIAL).write_text(definition)
    assert "ranks were started" in str(run_here(*RUN).exception)


# ----------------------------------------------------------------------------- what only the ranks can know


def assert_refused_once(run_dir: Path, *arguments: str | Path, says: tuple[str, ...], fix: str) -> None:
    done = det_ds("run", *arguments, "--run-dir", run_dir)
    assert done.returncode == EXIT_CONFIG, done.stderr
    for words in says:
        assert done.stderr.count(words) == 1, done.stderr
    assert fix in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_a_data_path_without_text(tmp_path: Path) -> None:
    folder = tmp_path / "void"
    folder.mkdir()
    assert_refused_once(
        tmp_path / "run",
        *("experiments/gpt2/const.yaml", ROOT, "--set", f"data.path={folder}"),
        says=("data.path", str(folder), "holds no text files"),
        fix=".jsonl",
    )


def test_a_class_that_is_no_trial(own_model: Path) -> None:
    with (own_model / TRIAL).open("a") as file:
        file.write("\n\nclass Model:\n    pass\n")
    replaced(EXPERIMENT, "trial:TinyTrial", "trial:Model")(own_model)
    assert_refused_once(
        own_model / "run",
        *(own_model / EXPERIMENT, own_model),
        says=("entrypoint = 'trial:Model'", "Model must be a subclass of DeepSpeedTrial"),
        fix="TinyTrial",
    )


def test_a_trial_that_lacks_a_method(own_model: Path) -> None:
    replaced(TRIAL, "def build_validation_data_loader", "def build_evaluation_data_loader")(own_model)
    assert_refused_once(
        own_model / "run",
        *(own_model / EXPERIMENT, own_model),
        says=("TinyTrial (trial:TinyTrial)", "does not define build_validation_data_loader"),
        fix="define it",
    )


def test_a_data_loader_with_another_batch_size(own_model: Path) -> None:
    replaced(
        TRIAL, "self.training_loader(samples(64, seed=1))", "DataLoader(samples(64, seed=1), batch_size=3)"
    )(own_model)
    assert_refused_once(
        own_model / "run",
        *(own_model / EXPERIMENT, own_model),
        says=("build_training_data_loader = 3", "is not the micro-batch size 4"),
        fix="self.training_loader(dataset)",
    )


def test_a_metric_that_the_trial_does_not_report(own_model: Path) -> None:
    replaced(EXPERIMENT, "metric: validation_loss", "metric: accuracy")(own_model)
    assert_refused_once(
        own_model / "run",
        *(own_model / EXPERIMENT, own_model),
        says=("searcher.metric", "accuracy"),
        fix="validation_loss",
    )


def test_an_import_that_fails_keeps_its_traceback(own_model: Path) -> None:
    """A trial that breaks is a failure of training, and the traceback says where."""
    replaced(TRIAL, "import torch\n", "import torch\nimport no_such_module\n")(own_model)
    done = det_ds("run", own_model / EXPERIMENT, own_model, "--slots", "1", "--run-dir", own_model / "run")
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert 'trial.py", line 8' in done.stderr
    assert "ModuleNotFoundError: No module named 'no_such_module'" in done.stderr
