"""The shape of a model that is built on torch's meta device: exact counts, and no memory taken.

Activations are measured there too, where the model runs on it.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from determined_ds.config.document import Document
from determined_ds.config.experiment import Experiment
from determined_ds.config.hyperparameters import OWN_KEYS
from determined_ds.config.reconcile import ResolvedConfig
from determined_ds.errors import ConfigError, DeterminedDSError, EntrypointError, Problem
from determined_ds.memory.model_shape import ModelShape
from determined_ds.memory.strategy import strategy_of
from determined_ds.runtime.live_bytes import first_sentence, try_to_measure

# What does not change a model, nor its samples.
NOT_THE_MODELS = {*OWN_KEYS, "learning_rate", "weight_decay", "warmup_num_steps"} - {"pipe_parallel_size"}
LONGEST_ASSUMED = 2048

_shapes: dict[str, ModelShape] = {}


def shape_of_experiment(
    experiment: Experiment,
    resolved: ResolvedConfig,
    context_dir: Path,
    *,
    hyperparameters: Document | None = None,
    precision: str | None = None,
) -> ModelShape:
    """The shape of an experiment's model: ``prepare`` and ``build_model`` are run, on the meta device.

    Built once for every set of hyperparameters that a model depends on.

    Args:
        experiment: Names the trial.
        resolved: Gives the pipeline stages and the precision.
        context_dir: The folder with the code.
        hyperparameters: The point of the search space that was resolved; the experiment's own, if None.
        precision: What activations are measured in; as resolved, if None.

    Raises:
        ConfigError: the trial cannot be built so.
    """
    if hyperparameters is not None:
        experiment = replace(experiment, hyperparameters=hyperparameters)
    precision = precision or strategy_of(resolved).precision
    own = {key: value for key, value in experiment.hyperparameters.data.items() if key not in NOT_THE_MODELS}
    data = experiment.config.get("data")
    key = json.dumps(
        [str(context_dir.resolve()), experiment.trial, own, data, precision], sort_keys=True, default=str
    )
    if key not in _shapes:
        with _inside(context_dir), _quiet():
            _shapes[key] = _build(experiment, resolved, precision)
    return _shapes[key]


def _build(experiment: Experiment, resolved: ResolvedConfig, precision: str) -> ModelShape:
    from determined_ds.trial.base import ReconciledTrial
    from determined_ds.trial.pipeline import PipelineTrial

    kind = _trial_class(experiment)
    if not issubclass(kind, ReconciledTrial):
        message = "is a DeepSpeedTrial of its own: its model is built together with its engine"
        raise _unbuildable(experiment, message)
    try:
        trial = _bare(kind, experiment, resolved)
        trial.prepare()
        with torch.device("meta"):
            if isinstance(trial, PipelineTrial):
                stages = resolved.topology.pipe_parallel_size
                layers = [_Layer(spec) for spec in _shared(trial.build_layers())]
                model: Any = _Chain(layers)
                stage_parameters = _stage_parameters(layers, trial.partition_method, stages)
            else:
                model, stage_parameters = trial.build_model(), ()
    except DeterminedDSError:
        raise
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        raise _unbuildable(
            experiment, f"fails on the meta device: {type(error).__name__}: {reason}"
        ) from error
    config = getattr(model, "config", None) or getattr(trial, "config", None)
    per_sample = trial.tokens_per_sample() or 0
    measured, assumptions = try_to_measure(model, lambda samples: _loss(trial, model, samples), precision)
    return _shape(
        model,
        config,
        sequence_length=per_sample,
        stage_parameters=stage_parameters,
        activations=measured,
        assumptions=assumptions,
    )


def _trial_class(experiment: Experiment) -> Any:
    module, _, name = experiment.trial.partition(":")
    _forget_namesake(module.split(".")[0])
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise EntrypointError(
            Problem(
                key="entrypoint",
                value=experiment.trial,
                origin=experiment.document.origin(("entrypoint",)),
                message=f"cannot be imported: {error}",
                mend="give the CONTEXT_DIR that holds it, and install what it needs",
                code="entrypoint",
            )
        ) from error


def _forget_namesake(package: str) -> None:
    """Let go of a module of another context directory that has the name of one in this, which is current."""
    here = Path.cwd().resolve()
    file = getattr(sys.modules.get(package), "__file__", None)
    if file is None or Path(file).resolve().is_relative_to(here):
        return
    if (here / package / "__init__.py").is_file() or (here / f"{package}.py").is_file():
        for name in [name for name in sys.modules if name.split(".")[0] == package]:
            del sys.modules[name]
        importlib.invalidate_caches()


def _unbuildable(experiment: Experiment, message: str) -> ConfigError:
    return ConfigError(
        Problem(
            key="entrypoint",
            value=experiment.trial,
            origin=experiment.document.origin(("entrypoint",)),
            message=message,
            mend="say its size instead: det-ds estimate --params 345M --layers 24 --hidden 1024",
            code="meta-build",
        )
    )


class _Context:
    """What a trial may ask of its context before it has an engine."""

    device = torch.device("meta")
    distributed = None

    def __init__(self, experiment: Experiment, resolved: ResolvedConfig) -> None:
        self.resolved = resolved
        self._experiment = experiment

    def get_hparams(self) -> dict[str, Any]:
        batch, topology = self.resolved.batch, self.resolved.topology
        return {
            **self._experiment.hyperparameters.data,
            "global_batch_size": batch.global_batch_size,
            "data_parallel_world_size": topology.data_parallel_world_size,
            "pipe_parallel_size": topology.pipe_parallel_size,
            "model_parallel_size": topology.model_parallel_size,
            "train_micro_batch_size_per_gpu": batch.micro_batch_size,
            "gradient_accumulation_steps": batch.accumulation,
        }

    def get_hparam(self, name: str) -> Any:
        return self.get_hparams()[name]

    def get_data_config(self) -> dict[str, Any]:
        return dict(self._experiment.config.get("data") or {})

    def get_experiment_config(self) -> dict[str, Any]:
        return self._experiment.config

    def get_trial_seed(self) -> int:
        return self._experiment.seed

    def get_global_batch_size(self) -> int:
        return self.resolved.batch.global_batch_size

    def get_per_slot_batch_size(self) -> int:
        return self.resolved.batch.micro_batch_size

    def to_device(self, batch: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), batch)


def _bare(kind: Any, experiment: Experiment, resolved: ResolvedConfig) -> Any:
    """A trial without an engine."""
    from attrdict import AttrDict

    trial = kind.__new__(kind)
    trial.context = _Context(experiment, resolved)
    trial.args = AttrDict(trial.context.get_hparams())
    trial.resolved = resolved
    return trial


@contextlib.contextmanager
def _inside(context_dir: Path) -> Iterator[None]:
    """As a rank is started: in the context directory, which imports begin at."""
    before = Path.cwd()
    if not torch.cuda.is_available():
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # as DeepSpeed would choose, with a warning on every start
    os.chdir(context_dir)
    sys.path.insert(0, str(context_dir.resolve()))
    try:
        yield
    finally:
        os.chdir(before)
        with contextlib.suppress(ValueError):
            sys.path.remove(str(context_dir.resolve()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of initial values that a meta tensor does not take
        yield


# ----------------------------------------------------------------------------------------- the pipeline


def _shared(specs: list[Any]) -> list[tuple[Any, Any]]:
    """(spec, module or function) in order; layers of one key share a module."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    tied: dict[str, Any] = {}
    built: list[tuple[Any, Any]] = []
    for spec in specs:
        if isinstance(spec, TiedLayerSpec):
            if spec.key not in tied:
                tied[spec.key] = spec.build()
            built.append((spec, tied[spec.key]))
        else:
            built.append((spec, spec.build() if isinstance(spec, LayerSpec) else spec))
    return built


class _Layer(torch.nn.Module):
    """One layer of a pipeline, called as DeepSpeed calls it."""

    def __init__(self, built: tuple[Any, Any]) -> None:
        super().__init__()
        spec, self.inner = built
        self.name = getattr(getattr(spec, "typename", None), "__name__", type(self.inner).__name__)
        self._forward_fn = getattr(spec, "forward_fn", None)

    def forward(self, inputs: Any) -> Any:
        return self._forward_fn(self.inner, inputs) if self._forward_fn else self.inner(inputs)


class _Chain(torch.nn.Sequential):
    def __init__(self, layers: list[_Layer]) -> None:
        super().__init__(*layers)


def _stage_parameters(layers: list[_Layer], method: str, stages: int) -> tuple[int, ...]:
    """Parameters of each stage, cut as ``PipelineModule._partition_layers`` (deepspeed 0.19.8) cuts.

    A tied layer counts on every stage that has it: each keeps a copy.
    """
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    sizes = [sum(p.numel() for p in layer.parameters()) for layer in layers]
    method = method.lower()
    if method == "uniform":
        bounds = partition_uniform(num_items=len(layers), num_parts=stages)
    else:
        weights = sizes
        if method.startswith("type:"):
            pattern = re.compile(method.removeprefix("type:"), re.IGNORECASE)
            weights = [int(bool(pattern.search(layer.name))) for layer in layers]
        bounds = partition_balanced(weights=weights, num_parts=stages)
    return tuple(
        sum(p.numel() for p in _Chain(layers[start:end]).parameters())
        for start, end in itertools.pairwise(bounds)
    )


# ------------------------------------------------------------------------------------ Hugging Face models


def shape_of_huggingface(
    source: Path, *, sequence_length: int | None = None, precision: str = "bf16"
) -> ModelShape:
    """The shape of the model that a Hugging Face configuration describes.

    Args:
        source: A ``config.json``, or the folder that holds one.
        sequence_length: Tokens of a sample; what the model has room for, up to 2048, if None.
        precision: What it is trained in: ``bf16``, ``fp16`` or ``fp32``.

    Raises:
        ConfigError: there is no such file, it is no configuration, or transformers does not know the model.
    """
    file = source / "config.json" if source.is_dir() else source
    if not file.is_file():
        message = "has no config.json in it" if source.is_dir() else "no such file or folder"
        raise _huggingface(source, message, "give a config.json, or the folder that save_pretrained wrote")
    try:
        import transformers
    except ImportError:
        message, mend = "needs the package transformers", "pip install 'determined-ds[models]'"
        raise _huggingface(source, message, mend) from None
    transformers.logging.set_verbosity_error()
    try:
        config = transformers.AutoConfig.from_pretrained(str(file), local_files_only=True)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _huggingface(
            source,
            first_sentence(error),
            "give a config.json of a model_type that the installed transformers has",
        ) from None
    text = config.get_text_config()
    room = getattr(text, "max_position_embeddings", None) or LONGEST_ASSUMED
    assumptions: tuple[str, ...] = ()
    if sequence_length is None:
        sequence_length = min(room, LONGEST_ASSUMED)
        assumptions = (f"samples of {sequence_length:,} tokens (--sequence-length)",)
    try:
        with torch.device("meta"), _quiet():
            model = _huggingface_model(config)
    except Exception as error:
        raise _huggingface(
            source, f"cannot be built: {first_sentence(error)}", "say its size with --params"
        ) from error

    def loss(arguments: dict[str, Any], samples: int) -> Any:
        tokens = torch.zeros(samples, sequence_length, dtype=torch.long, device="meta")
        return model(input_ids=tokens, labels=tokens, **arguments).loss

    # A mask of its own keeps a model from looking at values for padding, which a meta tensor has none of; but not
    # every model takes one.
    mask = torch.ones(1, 1, sequence_length, sequence_length, dtype=torch.bool, device="meta")
    more: tuple[str, ...] = ()
    measured = None
    for arguments in ({"attention_mask": mask, "use_cache": False}, {}):
        if measured is None:
            with _quiet():
                measured, more = try_to_measure(model, partial(loss, arguments), precision)
    return _shape(
        model,
        text,
        sequence_length=sequence_length,
        activations=measured,
        assumptions=(*assumptions, *more),
    )


def _huggingface_model(config: Any) -> Any:
    import transformers

    names = [name for name in (config.architectures or ()) if hasattr(transformers, name)]
    if names:
        return getattr(transformers, names[0])._from_config(config)
    if type(config) in transformers.AutoModelForCausalLM._model_mapping:
        return transformers.AutoModelForCausalLM.from_config(config)
    return transformers.AutoModel.from_config(config)


def _huggingface(source: Path, message: str, mend: str) -> ConfigError:
    return ConfigError(
        Problem(key="--hf-config", value=str(source), message=message, mend=mend, code="hf-config")
    )


# -------------------------------------------------------------------------------- sizes of a built model


def _shape(model: Any, config: Any, *, sequence_length: int, **known: Any) -> ModelShape:
    parameters = list(model.parameters())

    def size(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), 0)

    owned = (sum(p.numel() for p in module.parameters(recurse=False)) for module in model.modules())
    return ModelShape(
        num_parameters=max(1, sum(p.numel() for p in parameters)),
        num_trainable_parameters=sum(p.numel() for p in parameters if p.requires_grad),
        num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_heads=size("num_attention_heads", "n_head", "num_heads"),
        vocab_size=size("vocab_size"),
        sequence_length=sequence_length,
        largest_layer_parameters=max(owned, default=0),
        **known,
    )


# ---------------------------------------------------------------------------- a sample of a trial's data


def _loss(trial: Any, model: Any, samples: int) -> Any:
    """The loss of a micro-batch of so many samples out of the trial's own training data."""
    from torch.utils.data import default_collate

    from determined_ds.trial.pipeline import PipelineTrial

    loader = trial.build_training_data_loader()
    collate = getattr(loader, "collate_fn", None) or default_collate
    dtype = next(model.parameters()).dtype

    def moved(tensor: Any) -> Any:
        return tensor.to("meta", dtype if tensor.is_floating_point() else tensor.dtype)

    batch = tree_map_only(torch.Tensor, moved, collate([loader.dataset[0] for _ in range(samples)]))
    if isinstance(trial, PipelineTrial):
        inputs, targets = batch
        return trial.loss(model(inputs), targets)
    trial.engine = model
    output = trial.loss(model, batch)
    return output["loss"] if isinstance(output, dict) else output
