"""What ``"auto"`` means in a DeepSpeed JSON: a hyperparameter, the accelerator, or DeepSpeed's own default.

A value that nothing determines is left out, so that DeepSpeed's default holds; where DeepSpeed has none worth
having (the learning rate, the length of a schedule) it is a problem.
"""

from __future__ import annotations

from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.deepspeed_json import AUTO
from determined_ds.config.document import Document, KeyPath
from determined_ds.config.hyperparameters import FitOptions
from determined_ds.config.topology import Topology
from determined_ds.errors import ConfigError, Problem

# Leaf of the JSON -> names of the hyperparameter that fills it, first come first served. A leaf that is not
# listed is filled by the hyperparameter of its own name.
HYPERPARAMETER_NAMES: dict[str, tuple[str, ...]] = {
    "lr": ("learning_rate", "lr"),
    "warmup_max_lr": ("learning_rate", "lr"),
    "warmup_num_steps": ("warmup_num_steps", "warmup_steps"),
    "gradient_clipping": ("gradient_clipping", "max_grad_norm"),
    "eps": ("eps", "adam_epsilon"),
}
# ``GRADIENT_CLIPPING_DEFAULT`` in deepspeed 0.19.8's ``runtime/constants.py``.
GRADIENT_CLIPPING = 1.0
NEEDED = {"lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"}


def fill_autos(
    ds: Document,
    hyperparameters: Document,
    fit: FitOptions,
    topology: Topology,
    accelerator: Accelerator,
) -> Document:
    """Replace every "auto", and fill what a CPU needs said.

    Args:
        ds: The DeepSpeed JSON, batch sizes already filled.
        hyperparameters: All of them, the model's own included.
        fit: For ``total_num_steps``.
        topology: A bf16 pipeline accumulates gradients in fp32.
        accelerator: For precision, pinned memory and the optimizer's implementation.

    Raises:
        ConfigError: an "auto" that nothing determines and that DeepSpeed has no default for.
    """
    ds = _fill_precision(ds, topology, accelerator)
    problems: list[Problem] = []
    for path in _auto_paths(ds.data):
        value, origin = _value_for(path, hyperparameters, fit, accelerator)
        if value is not None:
            ds = ds.overwritten(path, value, origin)
        elif path[-1] in NEEDED:
            problems.append(_undetermined(ds, path))
        else:
            ds = _without(ds, path)
    if problems:
        raise ConfigError(problems)
    if ds.get(("gradient_clipping",)) is None:
        # DeepSpeed clips unless told not to; said here, so that it is seen.
        ds = ds.overwritten(("gradient_clipping",), GRADIENT_CLIPPING, "DeepSpeed's default")
    return _fill_optimizer(ds, accelerator)


def _auto_paths(data: Any, path: KeyPath = ()) -> list[KeyPath]:
    if isinstance(data, dict):
        return [found for key, value in data.items() for found in _auto_paths(value, (*path, key))]
    return [path] if data == AUTO else []


def _value_for(
    path: KeyPath, hyperparameters: Document, fit: FitOptions, accelerator: Accelerator
) -> tuple[Any, str]:
    leaf = str(path[-1])
    if leaf == "pin_memory":
        return accelerator.name == "cuda", f"the accelerator: {accelerator.name}"
    if leaf == "total_num_steps" and fit.max_length and fit.max_length.unit == "batches":
        return fit.max_length.value, f"fit.max_length, {hyperparameters.origin(('fit', 'max_length'))}"
    for name in HYPERPARAMETER_NAMES.get(leaf, (leaf,)):
        value = hyperparameters.get((name,))
        if value is not None and value != AUTO:
            return value, f"{name}, {hyperparameters.origin((name,))}"
    if leaf == "betas":
        pair = [hyperparameters.get((name,)) for name in ("adam_beta1", "adam_beta2")]
        if None not in pair:
            return pair, f"adam_beta1, {hyperparameters.origin(('adam_beta1',))}"
    if leaf == "warmup_min_lr":
        return _first_warmup_lr(hyperparameters)
    return None, ""


def _first_warmup_lr(hyperparameters: Document) -> tuple[float, str]:
    """Where a warm-up starts: at its first step's share of the peak. From 0, the first steps would teach nothing.

    Source: ``WarmupLR`` in deepspeed 0.19.8's ``runtime/lr_schedules.py`` takes two steps at ``warmup_min_lr``.
    """
    peaks = [hyperparameters.get((name,)) for name in HYPERPARAMETER_NAMES["warmup_max_lr"]]
    steps = [hyperparameters.get((name,)) for name in HYPERPARAMETER_NAMES["warmup_num_steps"]]
    peak = next((value for value in peaks if isinstance(value, (int, float))), 0.0)
    count = next((value for value in steps if isinstance(value, int) and value > 0), 0)
    if peak and count:
        return peak / count, "learning_rate / warmup_num_steps"
    return 0.0, "a warm-up from 0"


def _undetermined(ds: Document, path: KeyPath) -> Problem:
    names = HYPERPARAMETER_NAMES.get(str(path[-1]), (str(path[-1]),))
    mend = f"add the hyperparameter {names[0]}, or write a number"
    if path[-1] == "total_num_steps":
        mend = "state fit.max_length in batches, or write the number of steps"
    return Problem(
        key=ds.key(path),
        value=AUTO,
        origin=ds.origin(path),
        message="nothing says what it should be",
        mend=mend,
        code="auto-undetermined",
    )


def _without(ds: Document, path: KeyPath) -> Document:
    """The document without the leaf at ``path``, and without a section that this leaves empty."""
    data = ds.overwritten(path, None, "").data  # a deep copy
    while path:
        parent = data
        for step in path[:-1]:
            parent = parent[step]
        del parent[path[-1]]
        path = path[:-1]
        if parent:
            break
    return Document(name=ds.name, data=data, places=ds.places, overwrites=ds.overwrites, prefix=ds.prefix)


def _fill_precision(ds: Document, topology: Topology, accelerator: Accelerator) -> Document:
    """bf16 "auto" is on where the accelerator is made for it; else fp16 "auto" where that is all it has."""
    origin = f"the accelerator: {accelerator.name}"
    stated_fp16 = ds.get(("fp16", "enabled"))
    if ds.get(("bf16", "enabled")) == AUTO:
        on = accelerator.bf16 and stated_fp16 is not True
        ds = ds.overwritten(("bf16", "enabled"), on, origin)
    if stated_fp16 == AUTO:
        on = accelerator.name == "cuda" and not ds.get(("bf16", "enabled"), False)
        ds = ds.overwritten(("fp16", "enabled"), on, origin)
    dtype: KeyPath = ("data_types", "grad_accum_dtype")
    if ds.get(("bf16", "enabled")) is True and topology.pipe_parallel_size > 1 and ds.get(dtype) in (None, AUTO):
        ds = ds.overwritten(dtype, "fp32", "bf16 pipelines accumulate in fp32")
    return ds


def _fill_optimizer(ds: Document, accelerator: Accelerator) -> Document:
    """On a CPU torch's own Adam, so that nothing has to be compiled before the first step.

    Source: ``get_optimizer_configuration`` in deepspeed 0.19.8's ``runtime/engine.py``.
    """
    kind = str(ds.get(("optimizer", "type"), "")).lower()
    path: KeyPath = ("optimizer", "params", "torch_adam")
    if accelerator.name == "cpu" and kind in ("adam", "adamw") and ds.get(path) is None:
        ds = ds.overwritten(path, True, f"the accelerator: {accelerator.name}")
    return ds
