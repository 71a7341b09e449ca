"""A pipeline engine that carries out any schedule of :mod:`determined_ds.pipe`, on DeepSpeed's own instructions.

The way of a batch::

    Pipeline -> steps of this rank -> PlannedSchedule (DeepSpeed's instructions) -> PlannedEngine, one method each

DeepSpeed's engine does what a pass does, and all that comes before and after the micro-batches: the data, gradients of
tied weights, reduction over replicas, the optimizer. Here are the parts of a rank, and what passes between ranks.

Source: ``DualPipeVEngine`` in deepspeed 0.19.8's ``runtime/pipe/dualpipev.py``, which does the same for one schedule.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from determined_ds.pipe.orders import FORWARD, Pipeline
from determined_ds.trial.planned_module import PlannedModule
from determined_ds.trial.planned_schedule import AwaitMessage, InputPass, PlannedSchedule, WeightPass

Specs = tuple[bool, tuple[tuple[torch.Size, torch.dtype], ...]]  # whether it is one tensor; of each


def initialize(**arguments: Any) -> Any:
    """``deepspeed.initialize``, with the engine that a :class:`PlannedModule` needs. Returns the engine.

    Source: ``initialize`` in deepspeed 0.19.8's ``__init__.py``, which takes the engine's class from its own names.
    """
    is_planned = isinstance(arguments["model"], PlannedModule)
    kind = deepspeed.PipelineEngine
    try:
        if is_planned:
            deepspeed.PipelineEngine = PlannedEngine
        engine, *_ = deepspeed.initialize(**arguments)
    finally:
        deepspeed.PipelineEngine = kind
    return engine


class PlannedEngine(PipelineEngine):
    """Trains a :class:`PlannedModule`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._active: int | None = None
        self._is_made = False
        super().__init__(*args, **kwargs)
        self._is_made = True
        self.pipe_buffers.update({"grads": [], "losses": [], "groups": []})
        self._sent: dict[int, list[Any]] = {}
        self._awaited: dict[tuple[bool, int], list[Any]] = {}
        self._specs: dict[int, Specs] = {}
        self._announced: set[int] = set()

    # ------------------------------------------------------------------------------------ where the parts are

    @property
    def _pipe(self) -> Pipeline:
        return self.module.pipe

    def is_first_stage(self) -> bool:
        if not self._is_made:
            return super().is_first_stage()
        return self._active == 0 if self._active is not None else self._pipe.rank_of(0) == self.stage_id

    def is_last_stage(self) -> bool:
        if not self._is_made:
            return super().is_last_stage()
        last = self._pipe.parts - 1
        return self._active == last if self._active is not None else self._pipe.rank_of(last) == self.stage_id

    @property
    def loads_data(self) -> bool:
        """Whether this rank reads inputs or targets."""
        return self.stage_id in (self._pipe.rank_of(0), self._pipe.rank_of(self._pipe.parts - 1))

    def _loss_stage_global_rank(self) -> int:
        return self.grid.stage_to_global(self._pipe.rank_of(self._pipe.parts - 1))

    @contextlib.contextmanager
    def _at(self, part: int) -> Iterator[None]:
        self._active = part
        self.module.activate(part)
        try:
            yield
        finally:
            self._active = None

    # ------------------------------------------------------------------------------------ the schedule

    def _train_schedule(self) -> PlannedSchedule:
        self._planned = PlannedSchedule(self._of(self.micro_batches), self.stage_id)
        return self._planned

    def _inference_schedule(self, micro_batches: int) -> PlannedSchedule:
        self._planned = PlannedSchedule(self._of(micro_batches), self.stage_id, forward_only=True)
        return self._planned

    def _of(self, micro_batches: int) -> Pipeline:
        pipe = self._pipe
        return Pipeline(
            schedule=pipe.schedule, ranks=pipe.ranks, micro_batches=micro_batches, chunks=pipe.chunks
        )

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        super()._exec_schedule(pipe_schedule)
        self._forget_sent()

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._specs.clear()
        self._announced.clear()

    # ------------------------------------------------------------------------------------ passes

    def _beside(self, buffer_id: int, part: int, by: int) -> int:
        """The buffer of the same micro-batch in another part."""
        return buffer_id + by * self._planned.pipe.micro_batches

    def _exec_load_micro_batch(self, buffer_id: int, part: int) -> None:
        super()._exec_load_micro_batch(buffer_id)
        last = self._pipe.parts - 1
        if part != last and self._pipe.rank_of(last) == self.stage_id:
            there = self._beside(buffer_id, part, last - part)
            labels = self.pipe_buffers["labels"]
            labels[there], labels[buffer_id] = labels[buffer_id], None

    def _exec_forward_pass(self, buffer_id: int, part: int) -> None:
        with self._at(part):
            super()._exec_forward_pass(buffer_id)
        buffers, trains = self.pipe_buffers, torch.is_grad_enabled()
        if part == self._pipe.parts - 1:
            if trains:
                buffers["losses"][buffer_id] = self.loss
        elif self._pipe.rank_of(part + 1) == self.stage_id:
            buffers["inputs"][self._beside(buffer_id, part, 1)] = _detached(buffers["outputs"][buffer_id])
        if not trains:
            buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
            if part == self._pipe.parts - 1 or self._pipe.rank_of(part + 1) == self.stage_id:
                buffers["outputs"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, part: int) -> None:
        self._take_gradient(buffer_id, part)
        with self._at(part):
            super()._exec_backward_pass(buffer_id)
        self._let_go(buffer_id, part)

    def _take_gradient(self, buffer_id: int, part: int) -> None:
        """Have the gradient of a part's output, or its loss, where the engine takes it."""
        buffers = self.pipe_buffers
        if part == self._pipe.parts - 1:
            self.loss = buffers["losses"][buffer_id]
            buffers["losses"][buffer_id] = None
        elif self._pipe.rank_of(part + 1) == self.stage_id:
            there = self._beside(buffer_id, part, 1)
            self.grad_layer = _gradients(buffers["inputs"][there])
            buffers["inputs"][there] = None
        else:
            self.grad_layer = buffers["grads"][buffer_id]
            buffers["grads"][buffer_id] = None

    def _let_go(self, buffer_id: int, part: int) -> None:
        self.pipe_buffers["outputs"][buffer_id] = self.pipe_buffers["labels"][buffer_id] = None
        if part == 0:
            self.pipe_buffers["inputs"][buffer_id] = None

    # ------------------------------------------------------------------------------------ a backward pass in two

    def _exec_input_pass(self, buffer_id: int, part: int) -> None:
        """The gradient of a part's inputs, and what the gradients of its weights are made of later."""
        self._take_gradient(buffer_id, part)
        buffers = self.pipe_buffers
        if part == self._pipe.parts - 1:
            outputs, gradients = [self._scale_loss_by_gas(self.loss)], None
        else:
            made = _listed(buffers["outputs"][buffer_id])
            outputs, gradients = [each for each in made if each.is_floating_point()], _listed(self.grad_layer)
        inputs = _listed(buffers["inputs"][buffer_id])
        if any(each.requires_grad for each in inputs):
            with self._backward_of_engine():
                weights = iter(self.module.parameters_of(part))
                _, buffers["groups"][buffer_id] = stage_backward_input(outputs, gradients, inputs, weights)
        else:  # nothing waits: all of it is the weights'
            buffers["groups"][buffer_id] = (outputs, gradients)
        self._let_go(buffer_id, part)

    def _exec_weight_pass(self, buffer_id: int, part: int) -> None:
        """The gradients of a part's weights."""
        groups = self.pipe_buffers["groups"][buffer_id]
        self.pipe_buffers["groups"][buffer_id] = None
        with self._backward_of_engine():
            if isinstance(groups, tuple):
                torch.autograd.backward(*groups)
            else:
                stage_backward_weight(iter(self.module.parameters_of(part)), groups)

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """The loss is divided by the micro-batches before a backward pass, so its gradients are not."""
        return grad

    @contextlib.contextmanager
    def _backward_of_engine(self) -> Iterator[None]:
        """The engine's hooks refuse a backward pass that it has not begun."""
        self._running_engine_backward = True
        try:
            yield
        finally:
            self._running_engine_backward = False

    # ------------------------------------------------------------------------------------ messages

    def _exec_send_activations(self, buffer_id: int, part: int, peer: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        key = part + 1
        if self.dynamic_shape or key not in self._announced:
            self._announced.add(key)
            self._send_tensor_meta(outputs, peer)
        self._send(buffer_id, _listed(outputs), peer)
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None

    def _exec_recv_activations(self, buffer_id: int, part: int, peer: int) -> None:
        key = part
        if self.dynamic_shape or key not in self._specs:
            found = self._recv_tensor_meta(peer)
            self._specs[key] = (
                torch.is_tensor(found),
                tuple((each.shape, each.dtype) for each in _listed(found)),
            )
        is_one, specs = self._specs[key]
        made = [
            torch.empty(shape, dtype=dtype, device=self.device, requires_grad=dtype.is_floating_point)
            for shape, dtype in specs
        ]
        self._receive(True, buffer_id, made, peer)
        self.pipe_buffers["inputs"][buffer_id] = made[0] if is_one else tuple(made)

    def _exec_send_grads(self, buffer_id: int, part: int, peer: int) -> None:
        self._send(buffer_id, _listed(_gradients(self.pipe_buffers["inputs"][buffer_id])), peer)
        self.pipe_buffers["inputs"][buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int, part: int, peer: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        made = [torch.empty_like(each) for each in _listed(outputs) if each.is_floating_point()]
        self._receive(False, buffer_id, made, peer)
        self.pipe_buffers["grads"][buffer_id] = made[0] if torch.is_tensor(outputs) else made

    def _send(self, buffer_id: int, tensors: Sequence[torch.Tensor], peer: int) -> None:
        rank = self.grid.stage_to_global(peer)
        sent = [(torch.distributed.isend(each.detach().contiguous(), rank), each) for each in tensors]
        self._sent.setdefault(buffer_id, []).extend(sent)

    def _receive(
        self, is_activation: bool, buffer_id: int, tensors: Sequence[torch.Tensor], peer: int
    ) -> None:
        rank = self.grid.stage_to_global(peer)
        self._awaited[is_activation, buffer_id] = [
            torch.distributed.irecv(each.detach(), rank) for each in tensors
        ]

    def _exec_await_message(self, buffer_id: int, kind: str) -> None:
        for work in self._awaited.pop((kind == FORWARD, buffer_id), ()):
            work.wait()

    def _forget_sent(self) -> None:
        for sent in self._sent.values():
            for work, _ in sent:
                work.wait()
        self._sent.clear()

    _INSTRUCTION_MAP = {  # noqa: RUF012 — named and kept as DeepSpeed does
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.LoadMicroBatch: _exec_load_micro_batch,
        schedule.ForwardPass: _exec_forward_pass,
        schedule.BackwardPass: _exec_backward_pass,
        InputPass: _exec_input_pass,
        WeightPass: _exec_weight_pass,
        AwaitMessage: _exec_await_message,
        schedule.SendActivation: _exec_send_activations,
        schedule.RecvActivation: _exec_recv_activations,
        schedule.SendGrad: _exec_send_grads,
        schedule.RecvGrad: _exec_recv_grads,
    }


def _listed(tensors: Any) -> list[torch.Tensor]:
    return [tensors] if torch.is_tensor(tensors) else list(tensors)


def _detached(outputs: Any) -> Any:
    made = [each.detach().requires_grad_(each.is_floating_point()) for each in _listed(outputs)]
    return made[0] if torch.is_tensor(outputs) else tuple(made)


def _gradients(inputs: Any) -> Any:
    found = [each.grad for each in _listed(inputs) if each.is_floating_point()]
    return found[0] if torch.is_tensor(inputs) else found
