"""The sizes of a model on torch's meta device: parameters are counted, activations measured.

A forward and a backward pass on meta tensors compute nothing, but allocate and free as real ones do; the live bytes are
counted.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from determined_ds.config.strategy import ELEMENT_BYTES
from determined_ds.memory.model import MeasuredActivations, ModelShape

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Without the warnings of building on the meta device."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of initial values that a meta tensor does not take
        yield


def elements(parameter: Any) -> int:
    """Of a parameter as a whole, also where ZeRO 3 keeps only this rank's part of it."""
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def shape_of_built(model: Any, config: Any, *, sequence_length: int, **known: Any) -> ModelShape:
    """The shape of a model that is built, counted in its modules and read in its configuration.

    Args:
        model: A ``torch.nn.Module``, on any device.
        config: Of a Hugging Face model, or an object with sizes by the same names, or None.
        sequence_length: Tokens of a sample; 0 where samples have none.
        known: Other fields of the shape.
    """
    parameters = list(model.parameters())

    def size(*names: str) -> int:
        found = (getattr(config, name, None) for name in names)
        return next((value for value in found if isinstance(value, int)), 0)

    owned = (sum(map(elements, module.parameters(recurse=False))) for module in model.modules())
    return ModelShape(
        num_parameters=max(1, sum(map(elements, parameters))),
        num_trainable_parameters=sum(elements(p) for p in parameters if p.requires_grad),
        num_layers=size("num_hidden_layers", "n_layer", "num_layers"),
        hidden_size=size("hidden_size", "n_embd", "d_model"),
        num_heads=size("num_attention_heads", "n_head", "num_heads"),
        vocab_size=size("vocab_size"),
        sequence_length=sequence_length,
        largest_layer_parameters=max(owned, default=0),
        num_expert_parameters=sum(
            elements(each) for name, each in model.named_parameters() if ".experts." in name
        ),
        **known,
    )


def try_to_measure(
    model: Any, loss_of: Callable[[int], Any], precision: str
) -> tuple[MeasuredActivations | None, tuple[str, ...]]:
    """Measure a model's activations, if it runs on the meta device.

    Args:
        model: On the meta device; it is cast to ``precision``.
        loss_of: The loss of a micro-batch of so many samples.
        precision: ``bf16``, ``fp16`` or ``fp32``.

    Returns:
        The activations; or None, and the reason.
    """
    try:
        model.to(DTYPES[precision]).train()
        one, two = (_peak_bytes(model, loss_of, samples) for samples in (1, 2))
    except Exception as error:
        reason = f"the model does not run on the meta device: {first_sentence(error)}"
        return None, (f"activations by the sizes of a transformer ({reason})",)
    per_sample = max(1, two - one)
    return (
        MeasuredActivations(
            bytes_per_sample=per_sample,
            fixed_bytes=max(0, one - per_sample),
            element_bytes=ELEMENT_BYTES[precision],
        ),
        (),
    )


def _peak_bytes(model: Any, loss_of: Callable[[int], Any], samples: int) -> int:
    """Most bytes alive in a forward and backward pass, parameters and their gradients aside."""

    def free(parameter: Any) -> None:
        parameter.grad = None

    trained = (p for p in model.parameters() if p.requires_grad)
    handles = [p.register_post_accumulate_grad_hook(free) for p in trained]
    try:
        with LiveBytes([*model.parameters(), *model.buffers()]) as live, FusedAttention():
            loss = loss_of(samples)
            run_backward([loss], [torch.ones_like(loss)])
        return live.peak_bytes
    finally:
        for handle in handles:
            handle.remove()


def run_backward(outputs: Sequence[Any], gradients: Sequence[Any]) -> None:
    """``torch.autograd.backward`` without suspending function modes, which recomputation in the pass needs."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        tuple(outputs), tuple(gradients), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


class LiveBytes(TorchDispatchMode):
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
                self._note(leaf.untyped_storage())
        return output

    def _note(self, storage: Any) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self._seen.add(address)
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, address, size)

    def _forget(self, address: int, size: int) -> None:
        self._seen.discard(address)
        self.live_bytes -= size


class FusedAttention(TorchFunctionMode):
    """Attention that keeps what fused kernels keep; on the meta device it would keep every score."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            rest = ((kwargs or {}).get(name) for name in ("query", "key", "value")[len(args) :])
            query, key, value = (*args, *rest)[:3]
            return _Fused.apply(query, key, value)
        return func(*args, **(kwargs or {}))


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any) -> Any:
        output = query.new_empty((*query.shape[:-1], value.shape[-1]))
        ctx.save_for_backward(
            query, key, value, output, query.new_empty(query.shape[:-1], dtype=torch.float32)
        )
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def first_sentence(error: BaseException) -> str:
    """The first sentence of an error's message."""
    line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return line.split(". ")[0].rstrip(".")
