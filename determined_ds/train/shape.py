"""The shape of a model, built on torch's meta device: parameters are counted, activations measured, no memory taken.

A forward and a backward pass on meta tensors compute nothing, but allocate and free as real ones do; the live bytes are
counted. The layers of a pipeline are measured one after the other as well.
"""

from __future__ import annotations

import json
import warnings
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from determined_ds.config.params import OWN_KEYS
from determined_ds.config.resolve import ResolvedConfig
from determined_ds.config.strategy import ELEMENT_BYTES, is_asked_of_model
from determined_ds.errors import ConfigError, DeterminedDSError
from determined_ds.experiment.experiment import Experiment
from determined_ds.memory.model import LayerShape, MeasuredActivations, ModelShape, PartBytes
from determined_ds.pipe.partition import MEASURED
from determined_ds.train.bare_trial import SAY_SIZE, bare_trial, chain_of, inside, trial_class

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Hyperparameters that change neither a model nor its samples.
NOT_THE_MODELS = {*OWN_KEYS, "learning_rate", "weight_decay", "warmup_num_steps"} - {
    "pipe_parallel_size",
    "partition_method",
}
_shapes: dict[str, ModelShape] = {}


def shape_of_experiment(
    experiment: Experiment, resolved: ResolvedConfig, context_dir: Path, *, precision: str | None = None
) -> ModelShape:
    """The shape of an experiment's model: ``prepare`` and ``build_model`` are run, on the meta device.

    Built once for each set of hyperparameters that a model depends on.

    Args:
        experiment: Names the trial.
        resolved: Gives the pipeline stages.
        context_dir: The folder with the code.
        precision: What activations are measured in; None: as resolved.

    Raises:
        ConfigError: the trial cannot be built so, or it is a script, which is not run.
    """
    if experiment.script is not None:
        message = "a script builds its model by itself, and is not run for it"
        raise ConfigError(experiment.document.problem(("entrypoint",), message, SAY_SIZE, "unknown-model"))
    precision = precision or resolved.strategy.precision
    own = {key: value for key, value in experiment.hyperparameters.data.items() if key not in NOT_THE_MODELS}
    data, parts = experiment.config.get("data"), resolved.strategy.pipeline.parts
    depends = [str(context_dir.resolve()), experiment.trial, own, data, precision, parts]
    key = json.dumps(depends, sort_keys=True, default=str)
    if key not in _shapes:
        with inside(context_dir), warnings.catch_warnings(record=True):
            _shapes[key] = _shape_of_trial(experiment, resolved, precision)
    return _shapes[key]


def _shape_of_trial(experiment: Experiment, resolved: ResolvedConfig, precision: str) -> ModelShape:
    from determined_ds.trial import returned
    from determined_ds.trial.pipeline import PipelineTrial
    from determined_ds.trial.stream_loader import micro_batch_of

    document, parts = experiment.document, resolved.strategy.pipeline.parts
    try:
        kind = trial_class(experiment.trial, document.origin(("entrypoint",)))
        given = (experiment.hyperparameters.data, experiment.config, experiment.trial_seed)
        trial = bare_trial(kind, *given, resolved, "meta")
        trial.prepare()
        is_piped = isinstance(trial, PipelineTrial)
        with torch.device("meta"):
            if is_piped:
                model: Any = chain_of(returned.layers(trial, trial.build_layers(), parts))
            else:
                model = returned.model(trial, trial.build_model())
    except DeterminedDSError:
        raise
    except Exception as error:
        message = f"fails on the meta device: {type(error).__name__}: {_first_line(error)}"
        raise ConfigError(document.problem(("entrypoint",), message, SAY_SIZE, "meta-build")) from error

    def batch_of(samples: int) -> Any:
        made = micro_batch_of(trial.build_training_data_loader(), samples)
        dtype = next(model.parameters()).dtype
        moved = lambda each: each.to("meta", dtype if each.is_floating_point() else each.dtype)  # noqa: E731
        return tree_map_only(torch.Tensor, moved, made)

    def loss_of(samples: int) -> Any:
        batch = batch_of(samples)
        if is_piped:
            return trial.loss(model(batch[0]), batch[1])
        output = trial.loss(model, batch)
        return output["loss"] if isinstance(output, dict) else output

    def whole(samples: int, live: _LiveBytes) -> list[Bytes]:
        loss = loss_of(samples)
        _run_backward([loss], [torch.ones_like(loss)])
        return [{"peak": live.peak_bytes}]

    def by_layer(samples: int, live: _LiveBytes) -> list[Bytes]:
        return _of_layers(list(model), batch_of(samples), trial.loss, live)

    trial.engine = model
    config = getattr(model, "config", None) or getattr(trial, "config", None)  # before a pass may change it
    assumptions, known = list[str](), dict[str, Any]()
    interval = known["checkpoint_interval"] = trial.activation_checkpoint_interval if is_piped else 0
    [(fixed, more)], reason = _measure(model, precision, 1, whole)
    if reason:
        why = f"the model does not run on the meta device: {reason}"
        assumptions.append(f"activations by the sizes of a transformer ({why})")
    else:
        known["activations"] = MeasuredActivations(
            bytes_per_sample=max(1, more["peak"]),
            fixed_bytes=fixed["peak"],
            element_bytes=ELEMENT_BYTES[precision],
            # Of a pipeline the layers were measured one by one; DeepSpeed computes them again, on top.
            is_checkpointed=not interval and is_asked_of_model(trial.context.get_hparams()),
        )
    if is_piped:
        found, reason = _measure(model, precision, len(model), by_layer)
        if reason:
            assumptions.append(f"stages of even activations (a layer does not run alone: {reason})")
        if trial.chosen_partition == MEASURED:
            assumptions.append(
                "stages as by parameters (partition_method measured: a run measures its layers as it starts)"
            )
        known |= {"layer_element_bytes": ELEMENT_BYTES[precision], "partition_method": trial.chosen_partition}
        known["layers"] = tuple(
            LayerShape(
                name=layer.name,
                tied_key=layer.tied_key,
                fixed=PartBytes(**fixed),
                per_sample=PartBytes(**more),
                **_counts(layer),
            )
            for layer, (fixed, more) in zip(model, found, strict=True)
        )

    def size(*names: str) -> int:
        values = (getattr(config, name, None) for name in names)
        return next((value for value in values if isinstance(value, int)), 0)

    counts = _counts(model)
    return ModelShape(
        num_parameters=max(1, counts.pop("num_parameters")),
        num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_heads=size("num_attention_heads", "n_head", "num_heads"),
        vocab_size=size("vocab_size"),
        sequence_length=trial.tokens_per_sample() or 0,
        largest_layer_parameters=max(_counts(each, False)["num_parameters"] for each in model.modules()),
        num_expert_parameters=sum(p.numel() for name, p in model.named_parameters() if ".experts." in name),
        assumptions=tuple(assumptions),
        **counts,
        **known,
    )


def _counts(model: Any, recurse: bool = True) -> dict[str, Any]:
    parameters = list(model.parameters(recurse))
    trained = sum(each.numel() for each in parameters if each.requires_grad)
    return {"num_parameters": sum(map(torch.numel, parameters)), "num_trainable_parameters": trained}


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or repr(error)).splitlines()[0]


# ------------------------------------------------------------------------------------------- activations

Bytes = dict[str, int]  # by name


def _measure(
    model: Any, precision: str, parts: int, run: Callable[[int, _LiveBytes], list[Bytes]]
) -> tuple[list[tuple[Bytes, Bytes]], str]:
    """What a run of a model's parts holds: fixed bytes and bytes of each sample, by runs with one sample and with two.

    Parameters have gradients already, as from the second micro-batch of a step on: what is added to them is let go.
    Returns none, and why, where it does not run on the meta device.
    """
    parameters = [each for each in model.parameters() if each.requires_grad]
    runs = []
    try:
        model.to(DTYPES[precision]).train()
        for samples in (1, 2):
            for each in parameters:
                each.grad = torch.zeros_like(each)
            known = [*model.parameters(), *model.buffers(), *(each.grad for each in parameters)]
            with _LiveBytes(known) as live, _FusedAttention():
                runs.append(run(samples, live))
    except Exception as error:
        return [({}, {})] * parts, _first_line(error).split(". ")[0].rstrip(".")
    found = []
    for one, two in zip(*runs, strict=True):
        more = {name: max(0, two[name] - one[name]) for name in one}
        found.append(({name: max(0, one[name] - more[name]) for name in one}, more))
    return found, ""


def _of_layers(layers: list[Any], batch: Any, loss: Callable[..., Any], live: _LiveBytes) -> list[Bytes]:
    """What each layer holds in its forward and its backward pass, and hands on."""
    inputs, targets = batch
    found = list[Bytes]()
    for layer in layers:
        if found:  # as another part's output, whose gradient is sent there
            for each in _tensors(inputs):
                each.requires_grad_(each.is_floating_point())
        start = live.begin()
        outputs = layer(inputs)
        own = {"inputs": _bytes(inputs), "outputs": _bytes(outputs), "unsaved": 0}
        handed_on = None
        if layer is not layers[-1]:
            handed_on = tree_map_only(torch.Tensor, torch.Tensor.detach, outputs)
        else:
            outputs, with_outputs = loss(outputs, targets), live.live_bytes
            own["unsaved"] = with_outputs - live.live_bytes
        own |= {"kept": live.live_bytes - start, "forward": live.peak_bytes - start}
        floats = [each for each in _tensors(outputs) if each.requires_grad]
        gradients = [torch.empty_like(each) for each in floats]
        begin = live.begin()
        if floats:
            _run_backward(floats, gradients)
        found.append({**own, "backward": own["kept"] + live.peak_bytes - begin})
        for each in _tensors(inputs):
            each.grad = None
        inputs = handed_on
        del outputs, floats, gradients  # before the next layer is measured
    return found


def _run_backward(outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
    """``torch.autograd.backward`` without suspending function modes, which recomputation in the pass needs."""
    run, given = torch.autograd.Variable._execution_engine.run_backward, (tuple(outputs), tuple(gradients))
    run(*given, False, False, (), allow_unreachable=True, accumulate_grad=True)


class _LiveBytes(TorchDispatchMode):
    """Counts the storages that operators make until they are freed, except those of ``known`` tensors."""

    def __init__(self, known: list[Any]) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}

    def begin(self) -> int:
        """Forget the peak so far. Returns the bytes that are alive."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                address, size = storage._cdata, storage.nbytes()
                if address not in self._seen:
                    self._seen.add(address)
                    self.live_bytes += size
                    self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                    weakref.finalize(storage, self._forget, address, size)
        return output

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live_bytes -= size


class _FusedAttention(TorchFunctionMode):
    """Attention that keeps what a flash kernel keeps; on the meta device it would keep every score."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            rest = ((kwargs or {}).get(name) for name in ("query", "key", "value")[len(args) :])
            query, key, value = (*args, *rest)[:3]
            if query.ndim == 4 and query.shape[-1] == value.shape[-1]:  # what flash kernels take
                return torch.ops.aten._scaled_dot_product_flash_attention(query, key, value)[0]
        return func(*args, **(kwargs or {}))


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _bytes(tree: Any) -> int:
    return sum(each.numel() * each.element_size() for each in _tensors(tree))
