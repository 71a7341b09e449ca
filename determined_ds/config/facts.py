"""What is known of a point once its DeepSpeed JSON is filled: what the rules of the compatibility table read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from determined_ds.config.accelerator import Accelerator
from determined_ds.config.autoep import DEGREE, ENABLED, expert_degree
from determined_ds.config.autotp import stated_degree
from determined_ds.config.batch import Batch
from determined_ds.config.strategy import DTYPES, Strategy, read_strategy
from determined_ds.config.topology import Topology
from determined_ds.documents.document import Document
from determined_ds.pipe.orders import chunks_problem

ZERO = "zero_optimization"
# Of the optimizers that a JSON can name, those that ZeRO takes; the mu- ones make an Adam of torch's.
# Source: deepspeed 0.19.8 runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS; mup's optim.py.
ZERO_OPTIMIZERS = frozenset({"adam", "adamw", "adagrad", "lion", "muon", "muadam", "muadamw"})


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What a point runs with.

    Args:
        hyperparameters: All of the point.
        ds: The DeepSpeed JSON with every "auto" filled; each value has its place.
        topology: slots = pipe x model x sequence x data.
        batch: The completed batch.
        accelerator: What the ranks compute on.
        machines: Machines that the slots are spread over.
        torch_compile: Whether engines compile their models by ``torch.compile``.
        switched_on: DeepSpeed's instruments that ``fit.breakdown`` switches on, and not the JSON itself.
    """

    hyperparameters: Document
    ds: Document
    topology: Topology
    batch: Batch
    accelerator: Accelerator
    machines: int = 1
    torch_compile: bool = False
    switched_on: frozenset[str] = frozenset()

    @cached_property
    def strategy(self) -> Strategy:
        """How it is carried out: ZeRO stage, offload, precision, activation checkpointing, pipeline, compilers."""
        return read_strategy(
            self.ds.data,
            self.topology,
            self.batch,
            hyperparameters=self.hyperparameters.data,
            torch_compile=self.torch_compile,
        )

    @property
    def zero_stage(self) -> int:
        """``zero_optimization.stage``."""
        return self.strategy.zero_stage

    def zero(self, key: str) -> Any:
        """A value of ``zero_optimization``."""
        return self.ds.get((ZERO, key))

    @property
    def communication_dtype(self) -> str:
        """What gradients are reduced in; what the model computes in, unless stated."""
        return DTYPES.get(str(self.ds.get(("communication_data_type",))).lower(), self.strategy.precision)

    @property
    def reduces_in_parts(self) -> bool:
        """Whether ZeRO 2 or 3 hands each rank its part of the gradients alone, and refuses to scale them before.

        Source: deepspeed 0.19.8 ``__init__`` in runtime/zero/stage_1_and_2.py and runtime/zero/stage3.py.
        """
        averages = str(self.ds.get(("gradient_allreduce_op",), "mean")).lower() == "mean"
        return (
            self.zero("reduce_scatter") is not False
            and self.zero_stage >= 2
            and (averages or self.zero_stage == 3)
        )

    def enabled(self, section: str) -> bool:
        return bool(self.ds.get((section, "enabled"), False))

    # By short names, for the table.

    @property
    def pipe(self) -> int:
        return self.topology.pipe_parallel_size

    @property
    def schedule(self) -> str:
        """The schedule of a pipeline."""
        return self.strategy.pipe_schedule

    @property
    def partition_method(self) -> str | None:
        """The hyperparameter of that name."""
        return self.strategy.partition_method

    @property
    def schedule_problem(self) -> str:
        """Why the pipeline has no such schedule; "" where it has, or where that is said of ``pipe_chunks``."""
        pipe = self.strategy.pipeline
        return "" if chunks_problem(pipe.schedule, pipe.chunks) else pipe.problem()

    @property
    def bubble(self) -> str:
        """The share of time in which stages wait by the schedule alone, in words."""
        return f"{100 * self.strategy.bubble:.0f} %"

    @property
    def full_bubble(self) -> str:
        """The same with four micro-batches a stage."""
        return f"{100 * replace(self.strategy, accumulation=4 * self.pipe).bubble:.0f} %"

    @property
    def autotp(self) -> int:
        """Ranks that share a layer by DeepSpeed's AutoTP; 1: none."""
        return stated_degree(self.ds) or 1

    @property
    def experts(self) -> int:
        """Ranks that share the experts of a model by DeepSpeed's AutoEP; 0 where it leaves them as they are."""
        return expert_degree(self.ds.get(ENABLED), self.ds.get(DEGREE))

    @property
    def sequence(self) -> int:
        return self.topology.sequence_parallel_size

    @property
    def sequence_length(self) -> int:
        """The hyperparameter of that name, by which models of text state the tokens of a sample; 0 if there is none."""
        stated = self.hyperparameters.get(("sequence_length",))
        return stated if isinstance(stated, int) and not isinstance(stated, bool) else 0

    @property
    def micro_batches(self) -> int:
        return self.batch.accumulation

    @property
    def slots(self) -> int:
        return self.topology.slots

    @property
    def hpz(self) -> int:
        return self.strategy.hpz_partition_size

    @property
    def num_devices(self) -> int:
        return self.accelerator.num_devices

    @property
    def max_ranks(self) -> int:
        return self.accelerator.max_ranks * self.machines

    @property
    def optimizer_type(self) -> str:
        return str(self.ds.get(("optimizer", "type"), ""))

    @property
    def compiles_optimizer(self) -> bool:
        """Whether nvcc builds the JSON's optimizer at its first use.

        Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._configure_basic_optimizer.
        """
        kind = self.optimizer_type.lower()
        if self.accelerator.name != "cuda" or kind not in ("adam", "adamw", "lamb", "lion", "muon"):
            return False
        if kind != "lamb" and self.strategy.offload_optimizer:
            return False  # built by g++, for the CPU
        return not self.ds.get(("optimizer", "params", "torch_adam"))

    @property
    def is_muon(self) -> bool:
        """Whether the JSON's optimizer is DeepSpeed's Muon."""
        return self.optimizer_type.lower() == "muon"

    @property
    def uses_bf16_optimizer(self) -> bool:
        """Whether bf16 weights are stepped by DeepSpeed's BF16_Optimizer, and not by that of ZeRO 1.

        Source: deepspeed 0.19.8 runtime/engine.py DeepSpeedEngine._do_optimizer_sanity_check.
        """
        return self.zero_stage == 1 and self.enabled("bf16") and self.strategy.grad_dtype == "fp32"

    @property
    def super_offload(self) -> bool:
        """``zero_optimization.offload_optimizer.super_offload``."""
        return bool(self.ds.get((ZERO, "offload_optimizer", "super_offload")))

    @property
    def zero_takes_optimizer(self) -> bool:
        """Whether ZeRO takes the optimizer that the JSON names, if it names one."""
        kind = self.optimizer_type.lower()
        return kind in ("", *ZERO_OPTIMIZERS) or bool(self.ds.get(("zero_allow_untested_optimizer",)))

    def checkpointing(self, key: str) -> Any:
        """A value of ``activation_checkpointing``."""
        return self.ds.get(("activation_checkpointing", key))
