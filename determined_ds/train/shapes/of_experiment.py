"""The shape of an experiment's model, built on torch's meta device: by its trial, or as a script's YAML describes it.

Activations are measured there too, if the model runs on it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from determined_ds.config.params import OWN_KEYS
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import ELEMENT_BYTES, is_asked_of_model
from determined_ds.documents.document import Document
from determined_ds.errors import ConfigError, DeterminedDSError
from determined_ds.experiment.experiment import Experiment
from determined_ds.memory.model import ModelShape
from determined_ds.pipe.partition import MEASURED
from determined_ds.train.shapes.bare_trial import (
    SAY_SIZE,
    bare_trial,
    chain_of,
    entrypoint_problem,
    inside,
    trial_class,
)
from determined_ds.train.shapes.counting import quietly, shape_of_built, try_to_measure
from determined_ds.train.shapes.of_layers import try_to_measure_layers
from determined_ds.train.shapes.of_script import shape_of_script

# Hyperparameters that change neither a model nor its samples.
NOT_THE_MODELS = {*OWN_KEYS, "learning_rate", "weight_decay", "warmup_num_steps"} - {
    "pipe_parallel_size",
    "partition_method",
}

UNMEASURED = "stages as by parameters (partition_method measured: a run measures its layers as it starts)"

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

    A script is not run: a hyperparameter must describe its model. Built once for each set of hyperparameters that a
    model depends on.

    Args:
        experiment: Names the trial or the script.
        resolved: Gives the pipeline stages and the precision.
        context_dir: The folder with the code.
        hyperparameters: The resolved point of the search space; that of the experiment, if None.
        precision: What activations are measured in; as resolved, if None.

    Raises:
        ConfigError: the trial cannot be built so, or no hyperparameter of a script describes its model.
    """
    if hyperparameters is not None:
        experiment = replace(experiment, hyperparameters=hyperparameters)
    precision = precision or resolved.strategy.precision
    own = {key: value for key, value in experiment.hyperparameters.data.items() if key not in NOT_THE_MODELS}
    data = experiment.config.get("data")
    key = json.dumps(
        [
            str(context_dir.resolve()),
            experiment.trial,
            own,
            data,
            precision,
            resolved.strategy.pipeline.parts,
        ],
        sort_keys=True,
        default=str,
    )
    if key not in _shapes:
        with inside(context_dir), quietly():
            if experiment.script is not None:
                _shapes[key] = shape_of_script(experiment, precision)
            else:
                _shapes[key] = _build(experiment, resolved, precision)
    return _shapes[key]


def _build(experiment: Experiment, resolved: ResolvedConfig, precision: str) -> ModelShape:
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial

    kind = trial_class(experiment)
    try:
        trial = bare_trial(kind, experiment, resolved, "meta")
        trial.prepare()
        with torch.device("meta"):
            if isinstance(trial, PipelineTrial):
                parts = resolved.strategy.pipeline.parts
                layers = returned.layers(trial, trial.build_layers(), parts)
                model: Any = chain_of(layers)
                method = returned.partition_method(trial, trial.chosen_partition, layers)
                known: dict[str, Any] = {"partition_method": method}
            else:
                model, known = returned.model(trial, trial.build_model()), {}
    except DeterminedDSError:
        raise
    except Exception as error:
        reason = (str(error).strip() or repr(error)).splitlines()[0]
        message = f"fails on the meta device: {type(error).__name__}: {reason}"
        raise ConfigError(entrypoint_problem(experiment, message, SAY_SIZE, "meta-build")) from error
    config = getattr(model, "config", None) or getattr(trial, "config", None)
    per_sample = trial.tokens_per_sample() or 0
    measured, assumptions = try_to_measure(model, lambda samples: _loss(trial, model, samples), precision)
    if isinstance(trial, PipelineTrial):
        found, more = try_to_measure_layers(
            list(model), lambda samples: _batch(trial, model, samples), trial.loss, precision
        )
        known |= {"layers": found, "layer_element_bytes": ELEMENT_BYTES[precision]}
        unmeasured = (UNMEASURED,) if trial.chosen_partition == MEASURED else ()
        assumptions = (*assumptions, *more, *unmeasured)
    # Of a pipeline the layers were measured one by one; DeepSpeed computes them again, on top.
    interval = trial.activation_checkpoint_interval if isinstance(trial, PipelineTrial) else 0
    if measured is not None and not interval:
        measured = replace(measured, is_checkpointed=is_asked_of_model(trial.context.get_hparams()))
    return shape_of_built(
        model,
        config,
        sequence_length=per_sample,
        checkpoint_interval=interval,
        activations=measured,
        assumptions=assumptions,
        **known,
    )


# ---------------------------------------------------------------------------- a sample of a trial's data


def _loss(trial: Any, model: Any, samples: int) -> Any:
    """The loss of a micro-batch of so many samples of the trial's training data."""
    from determined_ds.trial.pipeline import PipelineTrial

    batch = _batch(trial, model, samples)
    if isinstance(trial, PipelineTrial):
        inputs, targets = batch
        return trial.loss(model(inputs), targets)
    trial.engine = model
    output = trial.loss(model, batch)
    return output["loss"] if isinstance(output, dict) else output


def _batch(trial: Any, model: Any, samples: int) -> Any:
    """A micro-batch of so many samples."""
    from determined_ds.trial.stream_loader import micro_batches_of

    make = micro_batches_of(trial.build_training_data_loader(), samples)
    dtype = next(model.parameters()).dtype

    def moved(tensor: Any) -> Any:
        return tensor.to("meta", dtype if tensor.is_floating_point() else tensor.dtype)

    return tree_map_only(torch.Tensor, moved, make())
