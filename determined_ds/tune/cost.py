"""How long a step will take: arithmetic (``step_times``), corrected by what was measured.

The logarithm of a step's time is that of the arithmetic, plus one number for every effect that a choice has beyond it
(a ZeRO stage, bf16, compiled kernels, ...). Before anything is measured the effects are what is usual, with a width;
each measurement narrows them, by linear regression with a Gaussian prior.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from determined_ds.memory.model import ModelShape
from determined_ds.memory.rank import memory_per_rank
from determined_ds.pipe.orders import ONE_F_ONE_B, SCHEDULES
from determined_ds.tune.step_times import step_seconds
from determined_ds.tune.variants import Variant

Vector = npt.NDArray[np.float64]
NOISE = 0.04  # of a measured median
MISFIT = 0.03  # of a variant that was not measured: what no sum of effects explains
UNKNOWN_SIZES = 3.0  # times as far off an effect may be, where no arithmetic stands below it

# Effect -> (what it usually is, how far off that may be), as logarithms of the step's time.
EFFECTS: dict[str, tuple[float, float]] = {
    "all": (0.0, 2.0),
    "zero1": (0.02, 0.10),
    "zero2": (0.04, 0.12),
    "zero3": (0.20, 0.20),
    "offload_optimizer": (0.10, 0.30),
    "offload_param": (0.10, 0.30),
    "pipeline": (0.05, 0.20),
    "micro-batches of a pipeline, doubled": (0.0, 0.08),
    **{schedule: (0.02, 0.08) for schedule in SCHEDULES if schedule != ONE_F_ONE_B},
    # What schedules take for their bookkeeping; their bubbles are in the arithmetic.
    "interleaved": (0.03, 0.08),
    "zb-h1": (0.03, 0.10),
    "dualpipev": (0.03, 0.10),
    "bf16": (-0.20, 0.30),
    "fp16": (-0.20, 0.30),
    "activation_checkpointing": (0.03, 0.10),
    "torch_compile": (-0.10, 0.15),
    "micro-batch, doubled": (-0.02, 0.04),
    "micro-batch, doubled, squared": (0.01, 0.01),
    "bf16 and ZeRO": (0.0, 0.08),
    "bf16 and pipeline": (0.0, 0.08),
}
NAMES = tuple(EFFECTS)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What is expected of a step.

    Args:
        log_seconds: The logarithm of its time.
        deviation: The standard deviation of that.
    """

    log_seconds: float
    deviation: float

    @property
    def seconds(self) -> float:
        return math.exp(self.log_seconds)

    def expected_improvement(self, best_log: float) -> float:
        """By how much, on average, the logarithm falls below the best that was measured; 0 where it surely does not."""
        if self.deviation <= 0:
            return max(0.0, best_log - self.log_seconds)
        z = (best_log - self.log_seconds) / self.deviation
        density = math.exp(-0.5 * z * z) / math.sqrt(2 * math.pi)
        below = 0.5 * (1 + math.erf(z / math.sqrt(2)))
        return self.deviation * (z * below + density)


class CostModel:
    """Predicts step times of variants, the better the more were measured.

    Args:
        own: The experiment's own micro-batch size, from which doublings are counted.
        knows_sizes: Whether the model's sizes are known. Without them there is no arithmetic: what is usual of each
            effect is all that is known before the first measurement, and each may be further off.
    """

    def __init__(self, own: int, *, knows_sizes: bool = True) -> None:
        self._own = own
        wider = 1.0 if knows_sizes else UNKNOWN_SIZES
        self._mean: Vector = np.array([EFFECTS[name][0] for name in NAMES])
        self._precision: Vector = np.diag([(wider * EFFECTS[name][1]) ** -2 for name in NAMES])
        self._rows: dict[int, tuple[Variant, Vector, float]] = {}  # by identity: a cache

    def learn(self, variant: Variant, shape: ModelShape | None, seconds: float) -> None:
        """Take in a measured step time."""
        x, known = self._row(variant, shape)
        weight = NOISE**-2
        precision = self._precision + weight * np.outer(x, x)
        right = self._precision @ self._mean + weight * x * (math.log(seconds) - known)
        self._mean = np.linalg.solve(precision, right).astype(np.float64)
        self._precision = precision

    def predict(self, variants: Sequence[Variant], shapes: Sequence[ModelShape | None]) -> list[Prediction]:
        """The step times of variants."""
        if not variants:
            return []
        of_each = [self._row(each, shape) for each, shape in zip(variants, shapes, strict=True)]
        rows, known = np.stack([row for row, _ in of_each]), np.array([log for _, log in of_each])
        covariance = np.linalg.inv(self._precision)
        deviations = np.sqrt(np.einsum("ij,jk,ik->i", rows, covariance, rows) + MISFIT**2)
        return [
            Prediction(log_seconds=float(mean), deviation=float(deviation))
            for mean, deviation in zip(known + rows @ self._mean, deviations, strict=True)
        ]

    def _row(self, variant: Variant, shape: ModelShape | None) -> tuple[Vector, float]:
        """A variant's effects, and the logarithm of its arithmetic; 0 where there is none."""
        if id(variant) not in self._rows:
            known = 0.0 if shape is None else math.log(arithmetic(variant, shape))
            self._rows[id(variant)] = variant, self._effects(variant, shape), known
        return self._rows[id(variant)][1:]

    def _effects(self, variant: Variant, shape: ModelShape | None) -> Vector:
        choice, resolved = variant.choice, variant.resolved
        assert resolved is not None
        strategy = resolved.strategy
        precision = strategy.precision
        is_pipeline = choice.pipe_parallel_size > 1
        doubled = math.log2(resolved.batch.micro_batch_size / self._own)
        bf16 = float(precision == "bf16")
        values = {
            "all": 1.0,
            **{f"zero{stage}": float(choice.zero_stage == stage) for stage in (1, 2, 3)},
            "offload_optimizer": float(choice.offload_optimizer),
            "offload_param": float(choice.offload_param),
            "pipeline": float(is_pipeline),
            "micro-batches of a pipeline, doubled": math.log2(resolved.batch.accumulation) * is_pipeline,
            strategy.pipe_schedule: float(is_pipeline),
            precision: 1.0,
            "activation_checkpointing": float(_is_checkpointed(variant, shape)),
            "torch_compile": float(resolved.torch_compile),
            "micro-batch, doubled": doubled * (not is_pipeline),
            "micro-batch, doubled, squared": doubled**2 * (not is_pipeline),
            "bf16 and ZeRO": bf16 * (choice.zero_stage > 0),
            "bf16 and pipeline": bf16 * is_pipeline,
        }
        return np.array([values.get(name, 0.0) for name in NAMES])


def arithmetic(variant: Variant, shape: ModelShape) -> float:
    """Seconds of a step by arithmetic alone, up to a factor that all variants share.

    Args:
        variant: One that can run.
        shape: Of its model.
    """
    resolved = variant.resolved
    assert resolved is not None
    strategy = resolved.strategy.checkpointed_by(shape.checkpoint_interval)
    return step_seconds(strategy, shape, resolved.accelerator.name)


def memory_bytes(variant: Variant, shape: ModelShape) -> int:
    """Bytes that a rank's tensors take at the peak, by the memory model."""
    assert variant.resolved is not None
    strategy = variant.resolved.strategy.checkpointed_by(shape.checkpoint_interval)
    memory = memory_per_rank(shape, strategy)
    on_host = memory.host_bytes if variant.resolved.accelerator.name == "cpu" else 0
    return memory.total_bytes + on_host


def _is_checkpointed(variant: Variant, shape: ModelShape | None) -> bool:
    """Whether activations are computed again, by choice or by the experiment itself."""
    assert variant.resolved is not None
    interval = 0 if shape is None else shape.checkpoint_interval
    return variant.resolved.strategy.checkpointed_by(interval).activation_checkpointing
