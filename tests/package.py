"""The one door to what is not public: the only file under ``tests`` that imports such names of ``determined_ds``.

It decides a configuration, checks an experiment, reads a run and reads a checkpoint. When a room of the package is
redrawn, this file follows, and the tests behind it stay as they are. What it returns is public, plain, or described
here; a test asks it for nothing else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest

from determined_ds import Accelerator, ConfigError, Experiment, Problem, ResolvedConfig, Results, reconcile
from determined_ds.check.experiment import check_files as check  # noqa: F401  the files of an experiment -> reports
from determined_ds.checkpoints.files import checkpoints_in, damage_of
from determined_ds.cluster.log import LOG_POLICIES, NO_RESTART_HELPS, OUT_OF_MEMORY  # noqa: F401  of a task's log
from determined_ds.config.params import Hyperparameters, schema_of
from determined_ds.config.resolve import Where, resolve
from determined_ds.config.rules import RULES
from determined_ds.documents.document import Document
from determined_ds.documents.text import parse_json, parse_yaml
from determined_ds.experiment.changes import changes_since, settings_of
from determined_ds.experiment.experiment import parse_experiment
from determined_ds.experiment.schema import experiment_problems
from determined_ds.experiment.space import points_of
from determined_ds.launch import placement

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted((ROOT / "experiments").glob("*/*.yaml"))
DS_CONFIGS = sorted((ROOT / "experiments" / "deepspeed").glob("*.json"))
ENTRYPOINT = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train trial:Trial"

CPU = Accelerator(name="cpu", num_devices=64, bf16=False, fp16=False)
CUDA = Accelerator(name="cuda", num_devices=64, bf16=True, fp16=True)
OLD_CUDA = Accelerator(name="cuda", num_devices=64, bf16=False, fp16=True)

# ------------------------------------------------------------------------------------------- deciding


def hyperparameters(source: str | Mapping[str, Any]) -> Document:
    """Hyperparameters from YAML text (named hp.yaml, with places) or from a mapping (without)."""
    if not isinstance(source, str):
        return Document(name="hyperparameters", data=dict(source), prefix="hyperparameters")
    read = parse_yaml(source, "hp.yaml")
    return Document(name=read.name, data=read.data, places=read.places, prefix="hyperparameters")


def ds_json(source: str | Mapping[str, Any]) -> Document:
    """A DeepSpeed JSON from its text (named ds.json, with places) or from a mapping (without)."""
    if isinstance(source, str):
        return parse_json(source, "ds.json")
    return Document(name="ds.json", data=dict(source))


def decide(
    hp: str | Mapping[str, Any] = "global_batch_size: 8",
    ds: str | Mapping[str, Any] = "{}",
    *,
    slots: int = 2,
    accelerator: Accelerator = CPU,
    slots_origin: str = "",
    machines: int = 1,
) -> ResolvedConfig:
    """``determined_ds.reconcile`` of texts or mappings."""
    return reconcile(
        hyperparameters(hp),
        ds_json(ds),
        slots=slots,
        accelerator=accelerator,
        slots_origin=slots_origin,
        machines=machines,
    )


def experiment(source: str | Mapping[str, Any], name: str = "const.yaml") -> Experiment:
    """An experiment from the text of its YAML, with places, or from a mapping."""
    if isinstance(source, str):
        return parse_experiment(parse_yaml(source, name))
    return parse_experiment(Document(name=name, data=dict(source)))


def resolved_of(
    experiment: Experiment, accelerator: Accelerator = CUDA, *, context_dir: Path = ROOT, machines: int = 1
) -> ResolvedConfig:
    """What the middle point of an experiment runs with."""
    where = Where(context_dir=context_dir, accelerator=accelerator, slots=experiment.slots, machines=machines)
    return resolve(experiment.hyperparameters, where)


def own_hyperparameters() -> list[str]:
    """Dotted names of the hyperparameters that the library reads, those within sections included."""

    def below(schema: Mapping[str, Any], above: str = "") -> Iterator[str]:
        for name, inner in schema.get("properties", {}).items():
            yield f"{above}{name}"
            yield from below(inner, f"{above}{name}.")

    return [*below(schema_of(Hyperparameters))]


class Rule(NamedTuple):
    """A rule of what cannot run together: its code, the dotted key that it names, and whether it only warns."""

    code: str
    key: str
    warning: bool


def rules() -> list[Rule]:
    """Every rule that a configuration is held to."""
    return [Rule(rule.code, ".".join(map(str, rule.key)), rule.warning) for rule in RULES]


def points(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The hyperparameters of every point that a search may visit; of a large or continuous space of a sample.

    A sample begins with the trials that a master creates, in its order; the corners of the space come last.
    """
    space = experiment(config).space
    return [space.at(values) for values in points_of(space)]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], **how: Any) -> dict[str, tuple[Any, ...]]:
    """What it means to a training that goes on with ``now`` from a checkpoint that ``before`` wrote.

    ``how`` says what is taken of the checkpoint: ``warm_start`` and ``refusal``. Returned are
    lines of what is ``effective``, another ``strategy`` or ``idle``, and the ``problems`` of what must stay.
    """
    was, experiment_now = experiment(before), experiment(now, "one.yaml")
    wrote = settings_of(was, resolved_of(was, CPU).ds_config)
    found = changes_since(
        wrote, experiment_now, resolved_of(experiment_now, CPU), written="checkpoint c", **how
    )
    return {name: getattr(found, name) for name in ("effective", "strategy", "idle", "problems")}


def schema_problems(config: str | Mapping[str, Any]) -> tuple[list[Problem], list[Problem]]:
    """Errors and warnings of an experiment's YAML by the master's schemas."""
    if isinstance(config, str):
        return experiment_problems(parse_yaml(config, "const.yaml"))
    return experiment_problems(Document(name="const.yaml", data=dict(config)))


def refusals(step: Callable[[], Any]) -> tuple[Problem, ...]:
    """The problems for which a step is refused. Each says what is wrong, and how to fix it."""
    with pytest.raises(ConfigError) as caught:
        step()
    for problem in caught.value.problems:
        assert problem.key or problem.origin
        assert problem.message
        assert problem.fix, problem
    return caught.value.problems


def refusal(step: Callable[[], Any]) -> Problem:
    """The one problem for which a step is refused."""
    (problem,) = refusals(step)
    return problem


# ------------------------------------------------------------------------------------------- choosing and scheduling


def bytes_per_rank(resolved: ResolvedConfig, **sizes: int) -> dict[str, int]:
    """The estimate for the rank that needs most, of a model by its sizes, named as in ``--memory --json``.

    Kinds are parameters, gradients, optimizer_states, activations, buffers and host.
    """
    from determined_ds.memory.model import ModelShape
    from determined_ds.memory.rank import memory_per_rank

    found = memory_per_rank(ModelShape(**sizes), resolved.strategy)
    return {name.removesuffix("_bytes"): value for name, value in vars(found).items()}


def under_strategy(
    config: Path, name: str, *overrides: str, slots: int = 2, accelerator: Accelerator = CUDA
) -> tuple[dict[str, Any], ResolvedConfig]:
    """The experiment that a strategy of ``det-ds compare`` makes of another, and what it runs with."""
    from determined_ds.experiment.decide import read_document
    from determined_ds.tune.variants import named_variants, read_base

    folder = ROOT if config.is_relative_to(ROOT) else config.parent
    base = read_base(read_document(config, folder, slots=slots, overrides=overrides), folder, accelerator)
    (made,) = named_variants(base, [name], [slots])
    if made.experiment is None or made.resolved is None:
        raise ConfigError(made.problems)
    return made.experiment.config, made.resolved


def _pipeline(schedule: str, ranks: int, micro_batches: int, chunks: int = 1) -> Any:
    from determined_ds.pipe.orders import Pipeline

    return Pipeline(schedule=schedule, ranks=ranks, micro_batches=micro_batches, chunks=chunks)


def order(*schedule: Any) -> list[list[tuple[str, int, int]]]:
    """What each rank of a pipeline computes: passes F, B or I and W, with their part of the model and micro-batch.

    ``schedule`` is its name, the ranks of a replica, micro-batches and chunks.
    """
    return [[tuple(op) for op in of_rank] for of_rank in _pipeline(*schedule).orders()]


def timeline(*schedule: Any, cost: Callable[[Any], float]) -> list[list[tuple[Any, float, float]]]:
    """When each pass of each rank runs: the pass, its start and its end; arguments as ``order``."""
    from determined_ds.pipe.timeline import timeline

    spans = timeline(_pipeline(*schedule), lambda op: cost(tuple(op)))
    return [[(tuple(each.op), each.start, each.end) for each in own] for own in spans]


def bubble(*schedule: Any) -> float:
    """The share of time in which ranks wait, as it is predicted: a backward pass takes twice a forward pass."""
    from determined_ds.pipe.timeline import counted_bubble

    return counted_bubble(_pipeline(*schedule))


def cut_by_times(seconds: Sequence[tuple[float, float]], *schedule: Any) -> list[int]:
    """Where each part of a pipeline starts, by the layers' forward and backward seconds; arguments as ``order``."""
    from determined_ds.pipe.partition import LayerTime, fastest

    layers = [LayerTime(name="", parameters=1, forward_s=f, backward_s=b) for f, b in seconds]
    return list(fastest(layers, _pipeline(*schedule))[:-1])


def trials_at_once(experiment: Experiment, accelerator: Accelerator) -> tuple[int, tuple[str, ...]]:
    """How many trials of a search run at a time on a machine, and the GPUs that they share out."""
    from determined_ds.search.plan import machine_of

    found = machine_of(experiment, accelerator)
    return found.at_once, found.gpus


# ------------------------------------------------------------------------------------------- runs and checkpoints


def records(run_dir: Path, group: str) -> list[tuple[int, dict[str, Any]]]:
    """The reports of a group in ``metrics.jsonl``: steps completed, metrics."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["steps_completed"], line["metrics"]) for line in lines if line["group"] == group]


def checkpoints(folder: Path) -> list[Path]:
    """The complete checkpoints of a run directory or of its ``checkpoints``, the newest first."""
    inside = folder / "checkpoints"
    return [found.path for found in checkpoints_in(inside if inside.is_dir() else folder)]


def damage(checkpoint: Path) -> str | None:
    """What is wrong with a checkpoint, in words; None where it is intact."""
    return damage_of(checkpoint)


def reseal(checkpoint: Path) -> None:
    """Have the list of its files be that of a checkpoint which a test has changed: it is intact again."""
    from determined_ds.checkpoints.files import files_of, fingerprint, write_manifest

    marks = {name: fingerprint(checkpoint / name) for name in files_of(checkpoint)}
    write_manifest(checkpoint, marks, json.loads((checkpoint / "metadata.json").read_text()))


def contents(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint holds, by the relative names of its files: tensors, numbers, indices."""
    import safetensors.torch
    import torch

    from determined_ds.checkpoints.safe_load import read_data

    held: dict[str, Any] = {}
    for file in sorted(checkpoint.rglob("*")):
        name = str(file.relative_to(checkpoint))
        if file.suffix in (".pt", ".pth"):
            held[name] = read_data(file, map_location=torch.device("cpu"))
        elif file.suffix == ".safetensors":
            held[name] = safetensors.torch.load_file(file)
        elif file.name == "index.json":
            held[name] = json.loads(file.read_text())
    return held


def tensors(checkpoint: Path, engine: int = 0) -> dict[tuple[str, str], Any]:
    """The tensors of an engine in a checkpoint, and the optimizer's numbers: name in the whole model and state -> it.

    The states are ``weight``, ``fp32`` (the optimizer's copy of it), and those of the optimizer, such as ``exp_avg``.
    """
    import torch

    from determined_ds.checkpoints.reader import stored_engine

    stored = stored_engine(checkpoint / f"model{engine}")
    names = {own: name for name, own in stored.index.common.items()}
    found = {}
    for name, tensor in stored.index.tensors.items():
        whole = names.get(name, name)
        for state in tensor.states:
            found[whole, state] = torch.cat(list(stored.pieces(name, state))).view(tensor.shape).clone()
        for key, value in tensor.scalars.items():
            found[whole, key] = torch.tensor(value)
    return found


def save_engines(trial: Any, context: Any, folder: Path) -> None:
    """In every rank: write the engines of a trial into a folder, without a training around them."""
    from determined_ds.checkpoints.engines import Engines

    engines = Engines(trial, context)
    engines.save(folder)
    engines.write_indexes(folder, engines.written)
    context.distributed.allgather(None)


def load_engines(trial: Any, context: Any, folder: Path) -> None:
    """In every rank: read the engines of a trial from such a folder, whichever ranks wrote it."""
    from determined_ds.checkpoints.engines import Engines

    Engines(trial, context).load(folder)


# ------------------------------------------------------------------------------------------- training


def training_data(
    loader: Any,
    split: tuple[int, int, int] = (1, 1, 1),
    *,
    replica: int = 0,
    seed: int = 7,
    start: int = 0,
    position: Mapping[str, Any] | None = None,
    note: Callable[[str], None] = print,
    as_it_is: bool = False,
) -> Any:
    """What a replica trains on where ``build_training_data_loader`` returns this loader.

    ``split`` is replicas, accumulation and samples in a micro-batch; ``start`` the optimizer steps before, of a run
    that is resumed; ``position`` what its checkpoint holds of the data; ``as_it_is`` whether the trial has called
    ``disable_dataset_reproducibility_checks``. Returned are ``batches``, endless micro-batches; ``batches_per_epoch``;
    ``state_dict()``, the position.
    """
    from types import SimpleNamespace

    from determined_ds.config.layout import Batch
    from determined_ds.train.data import loaders, samples

    method = "build_training_data_loader"
    trial = type("Trial", (), {"training_loader": None, method: lambda self: loader})()
    context = SimpleNamespace(_data_repro_checks_disabled=as_it_is)
    taken = loaders.build_loader(trial, context, method, note)
    size = split[0] * split[1] * split[2]
    batch = Batch(global_batch_size=size, replicas=split[0], accumulation=split[1], micro_batch_size=split[2])
    data = samples.TrainingData()
    data.load_state_dict(position or {})
    data.open(taken, note, batch=batch, replica=replica, seed=seed, start_batch=start)
    return data


def built_seed(seed: int, layer: int) -> int:
    """The seed under which a pipeline builds a layer; copies of a tied one are built as the first."""
    from determined_ds.trial.pipeline_engine import seed_of

    return seed_of(seed, layer)


def layer_seed(seed: int, replica: int, step: int, micro_batch: int, layer: int) -> int:
    """The seed of a pipeline's layer in a forward pass of training, all counted from 0; ``seed`` is the trial's."""
    from determined_ds.trial.pipeline_engine import seed_of

    return seed_of(seed, replica, step, micro_batch, layer)


def ending_of(error: BaseException, *, trained: bool = False) -> tuple[int, str]:
    """How a rank ends after an error, before its first batch or ``trained``: exit code, cause in ``result.json``."""
    from determined_ds.rundir.signals import TRAINED
    from determined_ds.train import rank

    with mock.patch.object(TRAINED, "is_set", return_value=trained):
        ending = rank.ending_of(error)
        return ending.code, ending.cause


def train_in_fp16_on_cpus() -> None:
    """In this rank, have the CPU be one that trains in fp16, as every GPU does."""
    from dataclasses import replace

    from deepspeed.accelerator import get_accelerator

    from determined_ds.devices import detect_accelerator
    from determined_ds.train import opening

    cpu = replace(detect_accelerator("cpu"), fp16=True)
    mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True).start()
    mock.patch.object(opening, "detect_accelerator", return_value=cpu).start()


def profile_of(folder: Path) -> dict[str, Any]:
    """What ``det-ds profile FOLDER`` writes to profile.json, of the traces in a folder or a run directory."""
    from determined_ds.profile.findings import analyse
    from determined_ds.profile.record import traces_in

    return json.loads(json.dumps(analyse(traces_in(folder)).as_json()))


# ------------------------------------------------------------------------------------------- results and searches


def write_report(results: Results, folder: Path, *, page: bool = True) -> list[Path]:
    """The files of a comparison: results.json, results.csv and, unless it is left out, report.html."""
    from determined_ds.report.comparison import write_report

    return write_report(results, folder, page=page)


class SearchMethod:
    """One of Determined's search methods, as ``det-ds search`` asks it what to do.

    An answer is a list of ``("create", hyperparameters, seed)``, whose trials are numbered from 1 in this order, and of
    ``("stop", trial)``.
    """

    def __init__(
        self, searcher: Mapping[str, Any], hyperparameters: Mapping[str, Any], seed: int = 0
    ) -> None:
        from determined_ds.experiment.space import read_space
        from determined_ds.search.methods import make_search, with_defaults

        config = Document(name="config", data={"hyperparameters": dict(hyperparameters)})
        space, problems = read_space(config, searcher=searcher["name"], seed=seed)
        assert not problems
        self._search = make_search(with_defaults(searcher), space)

    def start(self) -> list[tuple[Any, ...]]:
        """What it does at first."""
        return self._done(self._search.start())

    def validated(self, trial: int, metrics: Mapping[str, float]) -> list[tuple[Any, ...]]:
        """A trial has reported a validation, with its ``searcher.time_metric`` among the metrics."""
        return self._done(self._search.validated(trial, dict(metrics)))

    def exited(self, trial: int, reason: Any = None) -> list[tuple[Any, ...]]:
        """A trial has ended: by itself, or as ``INVALID_HP``, ``ERRORED`` or ``CANCELED``."""
        return self._done(self._search.exited(trial, reason))

    def _done(self, actions: list[Any]) -> list[tuple[Any, ...]]:
        return [
            ("create", each.hparams, each.seed) if hasattr(each, "hparams") else ("stop", each.number)
            for each in actions
        ]


# ------------------------------------------------------------------------------------------- processes


def place_of_rank(environment: Mapping[str, str]) -> dict[str, Any] | None:
    """The rank that another launcher has made of a process with these variables; None where it is none.

    SLURM's list of machines is ``node[1-2]``.
    """
    with mock.patch.object(placement, "_scontrol_hostnames", return_value=["node1", "node2"]):
        found = placement.placement_of(environment)
    return None if found is None else dict(vars(found))


def refused_by_task(experiment: Any, *, slots: int, accelerator: Accelerator | None = None) -> int | None:
    """The exit code by which the start-up hook refuses a task on this accelerator; None where it does not."""
    import contextlib

    from determined_ds.cluster import startup

    there = mock.patch.object(startup, "detect_without_torch", return_value=accelerator)
    with there if accelerator else contextlib.nullcontext():
        return startup.refused(experiment, slots=slots)


def start_task(environment: Mapping[str, str]) -> tuple[int, dict[str, str], list[str]]:
    """What the start-up hook decides in a container with these variables: exit code, exports, lines of the log."""
    import contextlib
    import io
    import shlex

    from determined_ds.cluster import startup

    out, err = io.StringIO(), io.StringIO()
    container = {"PATH": os.environ["PATH"], **environment}
    with (
        mock.patch.object(os, "environ", container),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        code = startup.main()
    words = [
        line.removeprefix("export ") for line in out.getvalue().splitlines() if line.startswith("export ")
    ]
    exports = dict(shlex.split(word)[0].split("=", 1) for word in words)
    return code, exports, err.getvalue().splitlines()


def start_by_forks(fork_rank: Callable[..., Any], fork_run: Callable[..., Any]) -> None:
    """In this process, start ranks and runs by these functions in place of new programs; see ``harness/forked.py``."""
    from types import SimpleNamespace

    from determined_ds.launch import ranks, trial_process
    from determined_ds.rundir.signals import die_with_parent

    die_with_parent()
    mock.patch.object(ranks, "start_process", fork_rank).start()
    forking = SimpleNamespace(**{**vars(trial_process.subprocess), "Popen": fork_run})
    mock.patch.object(trial_process, "subprocess", forking).start()


def load_as_a_rank_does() -> None:
    """Load everything of the package that a rank on CPU loads."""
    from determined_ds.train.group.process_group import load_deepspeed

    load_deepspeed("cpu")


def while_writing(act: Callable[[], object]) -> None:
    """In this rank, let the thread that writes checkpoints do this each time, with a half-written file."""
    import threading

    from determined_ds.checkpoints import engines

    write = engines.write_shard

    def acting(path: Path, *args: Any, **how: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            path.write_bytes(b"half")
            act()
        return write(path, *args, **how)

    engines.write_shard = acting


def show_signs_all_the_time() -> None:
    """In this rank, the watch shows a sign of life again and again."""
    from determined_ds.train.group import watch

    watch.INTERVAL_S = 0.01


def uploaded_to(storage: Mapping[str, Any]) -> Any:
    """In this rank, checkpoints are uploaded beside training as on a cluster whose ``checkpoint_storage`` this is."""
    from types import SimpleNamespace

    from determined_ds.checkpoints import writer

    trial = SimpleNamespace(_config={"checkpoint_storage": storage})
    info = SimpleNamespace(task_type="TRIAL", trial=trial)
    return mock.patch.object(writer, "cluster_info", return_value=info)


def built_by(resolved: ResolvedConfig) -> dict[str, str]:
    """The extensions that a configuration has DeepSpeed build, and the compiler of each."""
    from determined_ds.extensions import ops_of

    return {op.name: op.tools[0] for op in ops_of(resolved)}


def before_ranks(resolved: ResolvedConfig, environment: Mapping[str, str], *, torch_cuda: str = "") -> None:
    """What is looked for before ranks start, with a torch for this CUDA."""
    from determined_ds import extensions

    with mock.patch.object(extensions, "_constants_of", return_value={"cuda": torch_cuda}):
        extensions.before_ranks(resolved, environment)


def prepared_by_run(words: Sequence[str], accelerator: Accelerator) -> Any:
    """The result of ``det-ds run`` on a machine with this accelerator, until ranks would start."""
    from click.testing import CliRunner

    from determined_ds.cli.main import main
    from determined_ds.launch import prepare

    with (
        mock.patch.object(prepare, "detect_accelerator", return_value=accelerator),
        mock.patch.object(prepare.LocalRun, "launch", return_value=0),
    ):
        return CliRunner().invoke(main, ["run", *words])


def moved(batch: Any, device: str) -> Any:
    """A batch as it is moved to a device."""
    import torch

    from determined_ds.train.data import loaders

    return loaders.moved(batch, torch.device(device))
