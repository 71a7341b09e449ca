"""Every block of memory in a trace: when it is held, and by what.

Allocations and releases -> blocks, each with where it was allocated -> the looks at what engines hold name those of
parameters, gradients, optimizer states and buckets -> the others are activations if they live until the backward
pass, else temporary.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from determined_ds.profile.nesting import Nested
from determined_ds.profile.trace_file import BACKENDS, Allocation, Event, Trace
from determined_ds.protocol.profile_files import BACKWARD, HELD_LOOK

NEAR = 50  # operators that are looked back at for one around a time


@dataclass(eq=False, kw_only=True)
class Block:
    """Memory from its allocation to its release.

    Args:
        num_bytes: Its size.
        begin: Microseconds on the clock of the trace; minus infinity for one older than the record.
        end: The same; infinity for one that is never released.
        module: In which it was allocated; empty outside of modules.
        phase: In which it was allocated.
        owner: Name of :data:`~determined_ds.profile.memory_of_step.OWNERS`.
    """

    num_bytes: int
    begin: float
    end: float = float("inf")
    module: str = ""
    phase: str = "other"
    owner: str = ""


class Places:
    """Where a thread is at a time: in which module and which phase."""

    def __init__(self, trace: Trace, operators: Sequence[Nested]) -> None:
        self._found: dict[int | str, list[tuple[float, float, str, str]]] = defaultdict(list)
        for place in operators:
            event = place.event
            phase = "communication" if event.name.startswith("c10d::") else place.phase
            self._found[event.tid].append((event.begin, event.end, place.module, phase))
        for event in trace.events:
            if event.category == "user_annotation" and event.name.startswith(BACKENDS):
                self._found[event.tid].append((event.begin, event.end, "", "communication"))
        for found in self._found.values():
            found.sort(key=lambda each: each[0])
        self._begins = {tid: [each[0] for each in found] for tid, found in self._found.items()}

    def at(self, tid: int | str, at: float) -> tuple[str, str]:
        """Module and phase of the innermost operator around a time, or else of the last one before it."""
        index = bisect.bisect_right(self._begins.get(tid, ()), at) - 1
        if index < 0:
            return "", "other"
        found = self._found[tid]
        near = reversed(found[max(0, index - NEAR) : index + 1])
        return next((each for each in near if each[1] >= at), found[index])[2:]


@dataclass
class _Following:
    """Blocks, and which of them are held now."""

    live: dict[int, Block] = field(default_factory=dict)
    blocks: list[Block] = field(default_factory=list)

    def add(self, address: int, block: Block) -> None:
        self.live[address] = block
        self.blocks.append(block)

    def look(self, owners: Mapping[str, Sequence[Sequence[int]]]) -> None:
        """An engine was looked at: what lies at these addresses is its."""
        for owner, storages in owners.items():
            for address, num_bytes in storages:
                if address not in self.live:
                    self.add(address, Block(num_bytes=num_bytes, begin=float("-inf")))
                block = self.live[address]
                block.owner = block.owner or owner


def blocks_of(trace: Trace, allocations: Sequence[Allocation], places: Places) -> list[Block]:
    """Every block of memory, with its owner.

    Args:
        trace: Of a rank.
        allocations: Those of the device that is asked for, in the order of time.
        places: Of the trace.
    """
    following = _Following()
    times = {
        event.name.removeprefix(HELD_LOOK): event.begin
        for event in trace.events
        if event.name.startswith(HELD_LOOK)
    }
    looks = [(times[str(index)], look) for index, look in enumerate(trace.held) if str(index) in times]
    for each in allocations:
        while looks and looks[0][0] <= each.at:
            following.look(looks.pop(0)[1])
        if each.num_bytes >= 0:
            module, phase = places.at(each.tid, each.at)
            block = Block(num_bytes=each.num_bytes, begin=each.at, module=module, phase=phase)
            following.add(each.address, block)
        elif released := following.live.pop(each.address, None):
            released.end = each.at
    for _, look in looks:
        following.look(look)
    _name_owners(following.blocks, [event for event in trace.events if event.name == BACKWARD])
    return following.blocks


def _name_owners(blocks: Sequence[Block], backward: Sequence[Event]) -> None:
    """Name the owner of each block in which no look has found one.

    Args:
        blocks: All of them.
        backward: The backward passes, in the order of time.
    """
    begins = [event.begin for event in backward]
    for block in blocks:
        if block.owner:
            continue
        if block.phase in ("data", "communication"):
            block.owner = block.phase
            continue
        index = bisect.bisect_left(begins, block.begin)
        following = backward[index] if index < len(begins) else None
        outlives = following is not None and block.end > following.begin
        if block.phase == "forward":
            block.owner = "activations" if outlives else "temporary"
        elif block.phase == "other" and following is not None:  # such as the loss, outside of the engine
            block.owner = "activations" if outlives and block.end <= following.end else "other"
        else:
            block.owner = "temporary" if block.phase in ("recomputed", "backward", "optimizer") else "other"
