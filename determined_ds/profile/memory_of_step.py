"""Memory over a step, by what holds it: of the last step that was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from determined_ds.profile.memory_blocks import Block, Places, blocks_of
from determined_ds.profile.nesting import Nested
from determined_ds.profile.operators import alike
from determined_ds.profile.trace_file import Allocation, Event, Trace

# What holds memory -> what that is; in the order of pictures, from below.
OWNERS = {
    "parameters": "the weights",
    "optimizer_states": "the optimizer's states and its copy of the weights",
    "gradients": "gradients of the weights",
    "communication": "buckets and buffers of collectives",
    "activations": "what the forward pass keeps for the backward pass",
    "temporary": "what one operator hands to the next",
    "data": "micro-batches",
    "other": "the rest",
}
POINTS = 400  # of a curve
MODULES = 5  # named at the peak


@dataclass(frozen=True, kw_only=True)
class MemoryOfStep:
    """What a rank's tensors take over a step.

    Args:
        batch: Optimizer steps since the start of training, this one included.
        at_s: Since the begin of the step: when the values below are.
        bytes_by_owner: Name of :data:`OWNERS` -> bytes at these times.
        peak_at_s: When the most is held.
        peak_bytes_by_owner: What is held then.
        peak_phase: What runs then: a phase of the operators.
        peak_module: The module that runs then; empty outside of modules.
        peak_modules: Of activations and of what is temporary then, ``owner module`` -> bytes; the largest.
        knows_states: Whether the trace says where parameters, gradients and optimizer states are.
    """

    batch: int
    at_s: Sequence[float]
    bytes_by_owner: Mapping[str, Sequence[int]]
    peak_at_s: float
    peak_bytes_by_owner: Mapping[str, int]
    peak_phase: str
    peak_module: str
    peak_modules: Mapping[str, int]
    knows_states: bool = True

    @property
    def peak_bytes(self) -> int:
        """The most that is held."""
        return sum(self.peak_bytes_by_owner.values())

    @property
    def owner(self) -> str:
        """What holds most at the peak."""
        return max(self.peak_bytes_by_owner, key=lambda name: self.peak_bytes_by_owner[name])


def memory_of_step(trace: Trace, operators: Sequence[Nested]) -> MemoryOfStep | None:
    """The memory of the last recorded step; None where the trace has no allocations.

    Args:
        trace: Of a rank.
        operators: Of the trace.
    """
    on_gpu = trace.record.device == "cuda"
    allocations = [each for each in trace.allocations if each.device_type == int(on_gpu)]
    if not allocations or not trace.steps:
        return None
    step, places = trace.steps[-1], Places(trace, operators)
    blocks = blocks_of(trace, allocations, places)
    if on_gpu and (unseen := _unseen(allocations, blocks, step)) > 0:
        blocks.append(Block(num_bytes=unseen, begin=step.begin, owner="other"))
    points = list(_points(step, blocks))
    peak_at, at_peak = max(points, key=lambda point: sum(point[1].values()))
    module, phase = places.at(step.tid, peak_at)
    shown = _thinned(points, step)
    steps = trace.record.steps
    return MemoryOfStep(
        batch=steps[-1].batch if steps else 0,
        at_s=[(at - step.begin) / 1e6 for at, _ in shown],
        bytes_by_owner={owner: [point[owner] for _, point in shown] for owner in OWNERS},
        peak_at_s=(peak_at - step.begin) / 1e6,
        peak_bytes_by_owner=at_peak,
        peak_phase=phase,
        peak_module=module,
        peak_modules=_modules(blocks, peak_at),
        knows_states=bool(trace.held),
    )


def _unseen(allocations: Sequence[Allocation], blocks: Sequence[Block], step: Event) -> int:
    """What a GPU's allocator held as the step began, beyond the blocks that are known."""
    first = next((each for each in allocations if each.at >= step.begin), None)
    if first is None:
        return 0
    known = sum(block.num_bytes for block in blocks if block.begin < first.at <= block.end)
    return first.total_bytes - max(0, first.num_bytes) - known


def _points(step: Event, blocks: Sequence[Block]) -> Iterator[tuple[float, dict[str, int]]]:
    """The times at which what is held changes within the step, and what is held from then on."""
    changes: list[tuple[float, int, str]] = []
    for block in blocks:
        if block.begin < step.end and block.end > step.begin:
            changes.append((max(block.begin, step.begin), block.num_bytes, block.owner))
            if block.end < step.end:
                changes.append((block.end, -block.num_bytes, block.owner))
    now = dict.fromkeys(OWNERS, 0)
    for at, num_bytes, owner in sorted(changes):
        now[owner] += num_bytes
        yield at, dict(now)
    yield step.end, dict(now)


def _thinned(
    points: Sequence[tuple[float, dict[str, int]]], step: Event
) -> list[tuple[float, dict[str, int]]]:
    """Of each short time the point at which most is held."""
    highest: dict[int, tuple[float, dict[str, int]]] = {}
    for at, held in points:
        index = int(POINTS * (at - step.begin) / (step.end - step.begin))
        if index not in highest or sum(held.values()) > sum(highest[index][1].values()):
            highest[index] = at, held
    return [highest[index] for index in sorted(highest)]


def _modules(blocks: Sequence[Block], at: float) -> dict[str, int]:
    """Of the activations and of what is temporary at a time: owner and module -> bytes, the largest."""
    found: Counter[str] = Counter()
    for block in blocks:
        if block.begin <= at < block.end and block.owner in ("activations", "temporary"):
            found[f"{block.owner} {alike(block.module)}".strip()] += block.num_bytes
    return dict(found.most_common(MODULES))
