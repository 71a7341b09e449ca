"""What the ranks compute on, as far as a configuration depends on it. Detecting it is the runtime's matter."""

from __future__ import annotations

from dataclasses import dataclass

RANKS_PER_CPU_CORE = 4


@dataclass(frozen=True, kw_only=True)
class Accelerator:
    """A kind of device and how many of it there are.

    Args:
        name: ``cpu`` or ``cuda``, DeepSpeed's own names.
        num_devices: GPUs, or CPU cores.
        bf16: Whether ``bf16.enabled: "auto"`` is on. False for a CPU even where it has bf16 instructions:
            a run without a GPU serves for comparison, so it stays in fp32 unless bf16 is stated.
        fp16: Whether fp16 can be trained in at all.
    """

    name: str
    num_devices: int
    bf16: bool
    fp16: bool

    @property
    def max_ranks(self) -> int:
        """Ranks that one machine of these devices carries: one a GPU, four a CPU core."""
        return self.num_devices if self.name == "cuda" else self.num_devices * RANKS_PER_CPU_CORE


def assumed_cuda(slots: int) -> Accelerator:
    """A cluster's GPUs, one a slot, of a kind that computes in bf16."""
    return Accelerator(name="cuda", num_devices=slots, bf16=True, fp16=True)
