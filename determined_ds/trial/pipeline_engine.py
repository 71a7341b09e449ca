"""A pipeline module and engine for any schedule of :mod:`determined_ds.pipe`, on DeepSpeed's own instructions.

The way of a batch::

    Pipeline -> steps of this rank -> PlannedSchedule (DeepSpeed's instructions) -> PlannedEngine, one method each

DeepSpeed's engine does what a pass does, and all that comes before and after the micro-batches. Here are the parts of
a rank, what passes between ranks, and backward passes in two: for the inputs of a part, and for its weights, later.

Each layer has a seed of its own in each pass (:func:`seed_of`), so dropout and first weights do not depend on ranks and
schedules, and a pass that is computed anew, or after a resume, draws the same again. (DeepSpeed's ``seed_layers``
counts passes from the start of the process.)

Source: ``DualPipeVEngine`` in deepspeed 0.19.8's ``runtime/pipe/dualpipev.py``, which does the same for one schedule.
Of backward passes in two: arXiv:2401.10241, section 2; torch 2.13's ``distributed/pipelining/_backward.py``, whose
``stage_backward_weight`` sets ``.grad`` past the hooks by which ZeRO and DeepSpeed's bf16 optimizer take gradients.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import deepspeed.comm as comm
import torch
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch.autograd.graph import GradientEdge
from torch.utils._pytree import tree_map

from determined_ds.pipe.orders import BACKWARD, FORWARD, INPUT, ONE_F_ONE_B, WEIGHT, Pipeline
from determined_ds.pipe.partition import Bounds
from determined_ds.pipe.timeline import Receive, Send, steps
from determined_ds.trial.returned import refused

Specs = tuple[bool, tuple[tuple[torch.Size, torch.dtype], ...]]  # whether it is one tensor; of each


def seed_of(*place: int) -> int:
    """The seed of torch's generators for the trial's seed and a layer that is built, or for its pass in training.

    A pass is placed by the trial's seed, replica, step (also one that fp16 skips), micro-batch and layer, from 0.
    """
    return hash(place) % 2**63  # of integers, the same in every process


class ScheduledModule(PipelineModule):
    """The parts of a rank, one or several; ``forward`` computes the one that is active.

    Args:
        pipe: The schedule; its micro-batches do not matter here. One rank has 1F1B, whatever is asked for.
        bounds: Where each part starts, and the number of layers; None: as ``partition_method`` says.
        more: Arguments of ``PipelineModule``.
    """

    own_parts: list[int]  # that this rank holds
    functions: dict[int, list[Any]]  # of each of them, its layers
    is_planned: bool  # whether the schedule is another than that of DeepSpeed's own engine
    seed_fn: Callable[[int], None] | None

    def __init__(self, pipe: Pipeline, *, bounds: Bounds | None = None, **more: Any) -> None:
        pipe = pipe if pipe.ranks > 1 else replace(pipe, schedule=ONE_F_ONE_B, chunks=1)
        # The module is built within the constructor of its base.
        self.__dict__.update(pipe=pipe, bounds=bounds, functions={}, checkpointable={}, seeds=None)
        self.__dict__["is_planned"] = pipe.schedule != ONE_F_ONE_B
        super().__init__(**more)

    def _partition_layers(self, method: str = "uniform") -> None:
        self.num_stages = self.pipe.parts
        if self.bounds is None:
            super()._partition_layers(method)
        else:
            self.parts = list(self.bounds)
        self.own_parts = [part for part in range(self.pipe.parts) if self.pipe.rank_of(part) == self.stage_id]

    def stage_owner(self, layer_idx: int) -> int:
        return self.pipe.rank_of(super().stage_owner(layer_idx))

    def _build(self) -> None:
        self.seed_layers, self.seed_fn = True, self._seed_built
        with torch.random.fork_rng(_gpus()):
            for part in self.own_parts:
                self._set_bounds(self.parts[part], self.parts[part + 1])
                self.forward_funcs: list[Any] = []
                super()._build()
                self.functions[part], self.checkpointable[part] = self.forward_funcs, []
        self.seed_layers, self.seed_fn = False, None
        self.activate(self.own_parts[0])

    def _seed_built(self, number: int) -> None:
        """Seed a layer that is built, by ``base_seed`` plus its number; copies of a tied layer begin alike."""
        layer = number - self.base_seed
        if isinstance(spec := self._layer_specs[layer], TiedLayerSpec):
            layer = [getattr(each, "key", None) for each in self._layer_specs].index(spec.key)
        _seed(seed_of(self.base_seed, layer))

    def activate(self, part: int) -> None:
        """Make a part the one that ``forward`` computes."""
        self.forward_funcs = self.functions[part]
        self.is_checkpointable_results = self.checkpointable[part]
        self._set_bounds(self.parts[part], self.parts[part + 1])

    def _in_each_part(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        for part in self.own_parts:
            self.activate(part)
            method(*args, **kwargs)
        self.activate(self.own_parts[0])

    def _precompute_checkpointable_values(self) -> None:
        for part in self.own_parts:
            self.activate(part)
            self.is_checkpointable_results_interval = None  # the base keeps what it found for one part
            super()._precompute_checkpointable_values()
            self.checkpointable[part] = self.is_checkpointable_results
        self.activate(self.own_parts[0])

    def save_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().save_state_dict, *args, **kwargs)

    def load_state_dir(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().load_state_dir, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        self._in_each_part(super().compile, *args, **kwargs)

    def forward(self, forward_input: Any) -> Any:
        if self.seeds is None or not self.training:
            return super().forward(forward_input)
        layers, first, interval = self.forward_funcs, self._local_start, self.activation_checkpoint_interval
        seed = self.seeds(first)

        def run(start: int, end: int, *inputs: Any) -> Any:
            outputs = inputs[0] if len(inputs) == 1 else inputs
            for index in range(start, end):
                _seed(seed(first + index))
                outputs = layers[index](outputs)
            return outputs

        # What else draws numbers draws them as if no layer had been seeded.
        with torch.random.fork_rng(_gpus()):
            if not interval:
                return run(0, len(layers), forward_input)
            outputs = forward_input
            blocks = zip(range(0, len(layers), interval), self.is_checkpointable_results, strict=True)
            for start, is_recomputed in blocks:
                block = partial(run, start, min(start + interval, len(layers)))
                inputs = outputs if isinstance(outputs, tuple) else (outputs,)
                outputs = self.activation_checkpoint_func(block, *inputs) if is_recomputed else block(*inputs)
            return outputs


def seed_layers(engines: Iterable[Any], seed: int, replica: int) -> None:
    """Have the layers of a trial's pipelines draw by their place in the training; other engines are left alone."""

    def of_engine(engine: Any) -> Callable[[int], Callable[[int], int]]:
        passes: Counter[int] = Counter()  # through each part since the step began
        began = -1

        def of_pass(first_layer: int) -> Callable[[int], int]:
            nonlocal began
            if (now := engine.global_steps) != began:
                began = now
                passes.clear()
            passes[first_layer] += 1  # each schedule has the micro-batches of a part in order
            return partial(seed_of, seed, replica, now, passes[first_layer] - 1)

        return of_pass

    for engine in engines:
        if isinstance(module := getattr(engine, "module", None), ScheduledModule):
            module.seeds = of_engine(engine)


def _seed(seed: int) -> None:
    torch.random.default_generator.manual_seed(seed)
    for gpu in _gpus():
        torch.cuda.default_generators[gpu].manual_seed(seed)


def _gpus() -> list[int]:
    return [torch.cuda.current_device()] if torch.cuda.is_initialized() else []


class InputPass(schedule.BackwardPass):
    """The half of a backward pass that the rank before waits for."""


class WeightPass(schedule.BackwardPass):
    """The half that only the optimizer waits for."""


class AwaitMessage(schedule.BufferOpInstruction):
    """Wait for the message that a pass needs, whose receiving has begun."""


PASSES = {
    FORWARD: schedule.ForwardPass,
    BACKWARD: schedule.BackwardPass,
    INPUT: InputPass,
    WEIGHT: WeightPass,
}
MESSAGES = {
    (Send, True): schedule.SendActivation,
    (Send, False): schedule.SendGrad,
    (Receive, True): schedule.RecvActivation,
    (Receive, False): schedule.RecvGrad,
}


class PlannedSchedule(schedule.PipeSchedule):
    """The steps of a rank as DeepSpeed's instructions. Each part and micro-batch has a buffer; most are empty."""

    def __init__(self, pipe: Pipeline, rank: int, *, forward_only: bool = False) -> None:
        super().__init__(micro_batches=pipe.micro_batches, stages=pipe.ranks, stage_id=rank)
        self.pipe, self._forward_only = pipe, forward_only

    def num_pipe_buffers(self) -> int:
        return self.pipe.parts * self.pipe.micro_batches

    def steps(self) -> Iterator[list[Any]]:
        pipe, last = self.pipe, self.pipe.parts - 1
        for step in steps(pipe, forward_only=self._forward_only)[self.stage_id]:
            kind, part, micro_batch = step.op if isinstance(step, (Send, Receive)) else step
            if isinstance(step, Receive):  # into the buffer of the pass that takes it
                part += 1 if kind == FORWARD else -1
            buffer = part * pipe.micro_batches + micro_batch
            if isinstance(step, (Send, Receive)):
                yield [MESSAGES[type(step), kind == FORWARD](buffer, part=part, peer=step.rank)]
                continue
            if kind == FORWARD and (part == 0 or (part == last and pipe.rank_of(0) != self.stage_id)):
                yield [schedule.LoadMicroBatch(buffer, part=part)]
            if kind != WEIGHT:
                yield [AwaitMessage(buffer, kind=kind)]
            yield [PASSES[kind](buffer, part=part)]
        if not self._forward_only:
            yield [schedule.ReduceTiedGrads(), schedule.ReduceGrads(), schedule.OptimizerStep()]


class _Joined(torch.autograd.Function):
    """The outputs of a part as one scalar, so that all its parameters lie on a way from that to the inputs."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *outputs: torch.Tensor) -> torch.Tensor:
        ctx.gradients = gradients
        return outputs[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        return (None, *ctx.gradients)


class PlannedEngine(PipelineEngine):
    """Trains a :class:`ScheduledModule` by another schedule than DeepSpeed's own."""

    loss: torch.Tensor
    grad_layer: Any
    module: ScheduledModule

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._active: int | None = None
        self._last = -1  # the base asks for its stages as it is made, before there are parts
        super().__init__(*args, **kwargs)
        self._last = self.module.pipe.parts - 1
        # By buffer: the gradient of its outputs; the loss of the last part; what its weight pass has left to do.
        self._grads, self._losses, self._held = (dict[int, Any]() for _ in range(3))
        self._sent: dict[int, deque[list[tuple[Any, torch.Tensor]]]] = {}  # to each rank
        self._awaited: dict[tuple[bool, int], list[Any]] = {}
        self._specs: dict[int, Specs] = {}  # of what a part takes, here or elsewhere

    def _is_here(self, part: int) -> bool:
        return self.module.pipe.rank_of(part) == self.stage_id

    def _is_active(self, part: int) -> bool:
        """Whether a part is computed now; outside a pass, whether it is here."""
        return self._is_here(part) if self._active is None else self._active == part

    def is_first_stage(self) -> bool:
        return self._is_active(0) if self._last >= 0 else bool(super().is_first_stage())

    def is_last_stage(self) -> bool:
        return self._is_active(self._last) if self._last >= 0 else bool(super().is_last_stage())

    @property
    def loads_data(self) -> bool:
        """Whether this rank reads inputs or targets."""
        return self._is_here(0) or self._is_here(self._last)

    def _loss_stage_global_rank(self) -> int:
        return int(self.grid.stage_to_global(self.module.pipe.rank_of(self._last)))

    def _train_schedule(self) -> PlannedSchedule:
        return self._inference_schedule(self.micro_batches, forward_only=False)

    def _inference_schedule(self, micro_batches: int, *, forward_only: bool = True) -> PlannedSchedule:
        self._planned = replace(self.module.pipe, micro_batches=micro_batches)
        return PlannedSchedule(self._planned, self.stage_id, forward_only=forward_only)

    def _exec_schedule(self, pipe_schedule: Any) -> None:
        super()._exec_schedule(pipe_schedule)
        for peer in self._sent:
            self._await_sent(peer, 0)

    def reset_activation_shape(self) -> None:
        super().reset_activation_shape()
        self._specs.clear()

    def _beside(self, buffer_id: int, by: int) -> int:
        """The buffer of the same micro-batch, so many parts further on."""
        return buffer_id + by * self._planned.micro_batches

    def _exec_load_micro_batch(self, buffer_id: int, part: int) -> None:
        super()._exec_load_micro_batch(buffer_id)
        if part != self._last and self._is_here(self._last):
            labels, there = self.pipe_buffers["labels"], self._beside(buffer_id, self._last - part)
            labels[there], labels[buffer_id] = labels[buffer_id], None

    def _exec_forward_pass(self, buffer_id: int, part: int) -> None:
        self._active = part
        self.module.activate(part)
        super()._exec_forward_pass(buffer_id)
        self._active = None
        buffers, trains, is_last = self.pipe_buffers, torch.is_grad_enabled(), part == self._last
        if is_last and trains:
            self._losses[buffer_id], self.loss = self.loss, self.loss.detach()
        stays = not is_last and self._is_here(part + 1)
        if stays:
            buffers["inputs"][self._beside(buffer_id, 1)] = tree_map(leaf, buffers["outputs"][buffer_id])
        if not trains:
            buffers["inputs"][buffer_id] = buffers["labels"][buffer_id] = None
        if is_last or (stays and not trains):  # of the last part the loss alone is needed
            buffers["outputs"][buffer_id] = None

    @contextlib.contextmanager
    def _backward_of(self, buffer_id: int, part: int) -> Iterator[None]:
        """Around a backward pass: its loss or gradient of outputs where the engine takes them; frees what it used."""
        buffers = self.pipe_buffers
        if part == self._last:
            self.loss = self._losses.pop(buffer_id)
        elif self._is_here(part + 1):
            there = self._beside(buffer_id, 1)
            self.grad_layer, buffers["inputs"][there] = _gradients(buffers["inputs"][there]), None
        else:
            self.grad_layer = self._grads.pop(buffer_id)
        yield
        buffers["outputs"][buffer_id] = buffers["labels"][buffer_id] = None
        self.loss, self.grad_layer = self.loss.detach(), None
        if part == 0:  # other inputs stay until their gradients are sent
            buffers["inputs"][buffer_id] = None

    def _exec_backward_pass(self, buffer_id: int, part: int) -> None:
        with self._backward_of(buffer_id, part):
            self._active = part
            self.module.activate(part)
            super()._exec_backward_pass(buffer_id)
            self._active = None

    def _exec_input_pass(self, buffer_id: int, part: int) -> None:
        """The gradient of a part's inputs.

        Held for its weights are groups of parameters, with the nodes of the graph where their way leaves that to the
        inputs, and the gradients that arrived there; or outputs with their gradients, if all of it is the weights'.
        """
        buffers, groups = self.pipe_buffers, list[dict[str, Any]]()
        with self._backward_of(buffer_id, part):
            self._running_engine_backward = True  # its hooks refuse what the engine has not begun
            if part == self._last:
                outputs = [self.scale(self._scale_loss_by_gas(self.loss))]
                gradients = [torch.ones_like(outputs[0])]
            else:
                outputs, gradients = _floats(buffers["outputs"][buffer_id]), _listed(self.grad_layer)
            taken = [pair for pair in zip(outputs, gradients, strict=True) if pair[0].requires_grad]
            inputs = _listed(buffers["inputs"][buffer_id])
            if taken and any(each.requires_grad for each in inputs):
                # Loading it takes a second, which only such a schedule needs.
                from torch.distributed.pipelining._backward import stage_backward_input

                joined = _Joined.apply([grad for _, grad in taken], *(each for each, _ in taken))
                parameters = (each for each in self.module.parameters() if each.requires_grad)
                _, groups = stage_backward_input([joined], None, inputs, parameters)
            self._held[buffer_id] = groups, [] if groups else taken
            self._running_engine_backward = False

    def _exec_weight_pass(self, buffer_id: int, part: int) -> None:
        """The gradients of a part's weights, which are added to their ``.grad``; the graph is freed."""
        groups, whole = self._held.pop(buffer_id)
        # From one node of a weight that is used twice, gradients reach the next one through nodes that others need.
        is_kept = any(len(group["intermediates"]) > 1 for group in groups)
        self._running_engine_backward = True
        if self.using_bf16_optimizer:
            self.optimizer.clear_lp_grads()
        if whole:
            torch.autograd.backward([each for each, _ in whole], [grad for _, grad in whole])
        for group in groups:
            edges = []
            with contextlib.ExitStack() as hooks:
                for node, grads in zip(group.pop("intermediates"), group.pop("grads", ()), strict=False):
                    if found := [pair for pair in enumerate(grads or ()) if pair[1] is not None]:
                        edges += [(GradientEdge(node, at), gradient) for at, gradient in found]
                        # Nodes take what arrived in the first pass: neither more from one another, nor by a hook twice.
                        hooks.callback(node.register_prehook(lambda _, own=grads: own).remove)
                if edges:
                    at_edges, gradients = zip(*edges, strict=True)
                    own = [node.variable for node in group["params"]]
                    torch.autograd.backward(at_edges, gradients, retain_graph=is_kept, inputs=own)
        if self.using_bf16_optimizer:  # does nothing where hooks on the gradients have done it
            self.optimizer.update_hp_grads()
        self._running_engine_backward = False

    def _backward_prologue_per_tensor(self, grad: Any) -> Any:
        """The loss is divided by the micro-batches before a backward pass, so its gradients are not."""
        return grad

    def _exec_send_activations(self, buffer_id: int, part: int, peer: int) -> None:
        outputs, taker = self.pipe_buffers["outputs"][buffer_id], part + 1
        if not torch.is_grad_enabled():
            self.pipe_buffers["outputs"][buffer_id] = None
        specs, before = _specs(outputs), self._specs.get(taker)
        if self.dynamic_shape or before is None:
            self._specs[taker] = specs
            self._send_tensor_meta(outputs, peer)
        elif specs != before:
            was, now = (", ".join(f"{tuple(shape)}" for shape, _ in each) for _, each in (before, specs))
            message = f"a micro-batch of {now} after one of {was} between two stages of a pipeline"
            fix = "give all samples of training one size: pad or cut them, and drop a smaller last batch"
            raise refused("build_training_data_loader", message, fix, "pipeline-shapes")
        self._send(_listed(outputs), peer)

    def _exec_recv_activations(self, buffer_id: int, part: int, peer: int) -> None:
        if self.dynamic_shape or part not in self._specs:
            self._specs[part] = _specs(self._recv_tensor_meta(peer))
        is_one, specs = self._specs[part]
        made = [leaf(torch.empty(shape, dtype=dtype, device=self.device)) for shape, dtype in specs]
        rank = self.grid.stage_to_global(peer)
        self._awaited[True, buffer_id] = [comm.irecv(each.detach(), rank) for each in made]
        self.pipe_buffers["inputs"][buffer_id] = made[0] if is_one else tuple(made)

    def _allocate_or_extend_buffers(self, idx: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """What ``_recv_tensor_meta`` describes a tensor by; DeepSpeed's are of the type of whatever came first."""
        return torch.empty(shape, dtype=dtype, device="meta")

    def _exec_send_grads(self, buffer_id: int, part: int, peer: int) -> None:
        inputs = self.pipe_buffers["inputs"]
        self._send(_listed(_gradients(inputs[buffer_id])), peer)
        inputs[buffer_id] = None

    def _exec_recv_grads(self, buffer_id: int, part: int, peer: int) -> None:
        outputs = self.pipe_buffers["outputs"][buffer_id]
        made = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in _floats(outputs)]
        rank = self.grid.stage_to_global(peer)
        self._awaited[False, buffer_id] = [comm.irecv(each, rank) for each in made]
        self._grads[buffer_id] = made[0] if torch.is_tensor(outputs) else made

    def _exec_await_message(self, buffer_id: int, kind: str) -> None:
        for work in self._awaited.pop((kind == FORWARD, buffer_id), ()):
            work.wait()

    def _send(self, tensors: Sequence[torch.Tensor], peer: int) -> None:
        self._await_sent(peer, 1)  # by the schedule, a rank asks for each message before the next is made
        rank = self.grid.stage_to_global(peer)
        sent = [each.detach().contiguous() for each in tensors]
        self._sent.setdefault(peer, deque()).append([(comm.isend(each, rank), each) for each in sent])

    def _await_sent(self, peer: int, most: int) -> None:
        """Wait until so many messages are on their way to a rank, and forget the others."""
        while len(self._sent.get(peer, ())) > most:
            for work, _ in self._sent[peer].popleft():
                work.wait()

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


def _floats(tensors: Any) -> list[torch.Tensor]:
    return [each for each in _listed(tensors) if each.is_floating_point()]


def leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.is_floating_point())


def _gradients(inputs: Any) -> Any:
    """Of what a part has taken; zeros for what it has not used."""
    found = [torch.zeros_like(each) if each.grad is None else each.grad for each in _floats(inputs)]
    return found[0] if torch.is_tensor(inputs) else tuple(found)


def _specs(tensors: Any) -> Specs:
    return torch.is_tensor(tensors), tuple((each.shape, each.dtype) for each in _listed(tensors))
