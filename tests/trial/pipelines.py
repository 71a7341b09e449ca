"""A small language model as layers of a pipeline under any schedule, and the same by plain PyTorch in one process.

Runs inside ranks, and the latter in tests.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from determined_ds.pipe.orders import Pipeline

WIDTH, VOCABULARY, TIME, BATCH, SEED = 8, 11, 3, 4, 7
BLOCKS = 13  # with embedding, function and head sixteen layers: four ranks of four parts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training.

    Args:
        schedule: Of the pipeline.
        ranks: Of one replica.
        chunks: Parts of a rank.
        micro_batches: Of a step and a replica.
        replicas: Pipelines beside each other.
        zero: Its stage.
        clipping: Of the gradient's norm; 0: none.
        interval: Of activation checkpointing.
        dropout: Of each block.
        steps: Optimizer steps.
        more: Of the DeepSpeed JSON.
    """

    schedule: str
    ranks: int = 2
    chunks: int = 1
    micro_batches: int = 4
    replicas: int = 1
    zero: int = 0
    clipping: float = 0.5
    interval: int = 0
    dropout: float = 0.3
    steps: int = 20
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def pipe(self) -> Pipeline:
        return Pipeline(
            schedule=self.schedule, ranks=self.ranks, micro_batches=self.micro_batches, chunks=self.chunks
        )


@contextlib.contextmanager
def made_by(seed: int) -> Iterator[None]:
    """The same first weights, whoever builds them."""
    with torch.random.fork_rng(devices=[]):
        torch.random.default_generator.manual_seed(seed)
        yield


class Tokens(torch.nn.Module):
    """Embedding and head have one weight."""

    def __init__(self) -> None:
        super().__init__()
        with made_by(SEED):
            self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens_BT, self.weight)


def head(layer: Tokens, hidden_BTW: torch.Tensor) -> torch.Tensor:
    return hidden_BTW @ layer.weight.T


class Block(torch.nn.Module):
    """A residual block with dropout, a weight that is used twice, and an output that is a view."""

    def __init__(self, index: int, dropout: float) -> None:
        super().__init__()
        with made_by(index):
            self.norm, self.inner = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.dropout = torch.nn.Dropout(dropout)

    def forward(self, hidden_BTW: torch.Tensor) -> torch.Tensor:
        inner = self.inner(torch.tanh(self.inner(self.norm(hidden_BTW))))
        return (hidden_BTW + self.dropout(self.out(inner))).view(-1, TIME, WIDTH)


def halved(hidden_BTW: torch.Tensor) -> torch.Tensor:
    """A layer that is a function."""
    return hidden_BTW / 2


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def batches_of(case: Case, step: int, replica: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1000 * step + replica)
    return [
        tuple(torch.randint(VOCABULARY, (BATCH, TIME), generator=generator) for _ in range(2))
        for _ in range(case.micro_batches)
    ]  # type: ignore[misc]


def tail_of() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Micro-batches of an evaluation: one more than training may have, the last one smaller."""
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randint(VOCABULARY, (size, TIME), generator=generator) for _ in range(2))
        for size in (BATCH, BATCH, 1)
    ]  # type: ignore[misc]


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a training has led to.

    Args:
        losses: Of each step.
        evaluated: Before and after.
        weights: By the names that a pipeline has.
    """

    losses: list[float]
    evaluated: list[float]
    weights: dict[str, np.ndarray]


def plainly(case: Case) -> Trained:
    """By plain PyTorch, which seeds each layer as a pipeline does."""
    from determined_ds.trial.seeded_module import layer_seed

    tokens = Tokens()
    blocks = [Block(index, case.dropout) for index in range(1, BLOCKS + 1)]
    layers = [tokens, *blocks, halved, lambda hidden: head(tokens, hidden)]
    named = {
        f"{index}.{name}": p for index, block in enumerate(blocks, 1) for name, p in block.named_parameters()
    }
    named["tied_modules.tokens.weight"] = tokens.weight
    optimizer = torch.optim.AdamW(named.values(), lr=0.01)

    def forward(inputs: Any, seeds: tuple[int, ...] | None) -> torch.Tensor:
        for block in blocks:
            block.train(seeds is not None)
        for index, layer in enumerate(layers):
            if seeds is not None:
                torch.random.default_generator.manual_seed(layer_seed(*seeds, index))
            inputs = layer(inputs)
        return inputs

    def evaluate() -> float:
        with torch.no_grad():
            losses = [float(loss_of(forward(inputs, None), targets)) for inputs, targets in tail_of()]
        return sum(losses) / len(losses)

    evaluated, losses = [evaluate()], []
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for replica in range(case.replicas):
            for number, (inputs, targets) in enumerate(batches_of(case, step, replica)):
                outputs = forward(inputs, (SEED, replica, step, number))
                loss = loss_of(outputs, targets) / case.micro_batches / case.replicas
                loss.backward()
                total += loss.item()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(named.values(), case.clipping)
        optimizer.step()
        losses.append(total)
    weights = {name: parameter.detach().clone().float().numpy() for name, parameter in named.items()}
    return Trained(losses=losses, evaluated=[*evaluated, evaluate()], weights=weights)


def engine_of(case: Case, layers: list[Any], loss: Any) -> Any:
    """The engine of a case, corrected as a trial's is."""
    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.trial.engine import fix_engine
    from determined_ds.trial.ordered_engine import initialize
    from determined_ds.trial.ordered_module import made_module

    if not torch.distributed.is_initialized():
        join_process_group(detect_accelerator("cpu"))
    with contextlib.redirect_stdout(io.StringIO()):
        module = made_module(
            case.pipe,
            num_stages=case.ranks,
            layers=layers,
            loss_fn=loss,
            partition_method="uniform",
            activation_checkpoint_interval=case.interval,
            checkpointable_layers=["Block"] if case.interval else None,
        )
    config = {
        "train_batch_size": BATCH * case.micro_batches * case.replicas,
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_clipping": case.clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": case.zero, "reduce_bucket_size": 10_000},
        **case.more,
    }
    engine = initialize(model=module, model_parameters=module.parameters(), config=config)
    fix_engine(engine)
    return engine


def in_ranks(cases: list[Case]) -> list[Trained]:
    """Each training of some; of its weights, those that this rank holds."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from determined_ds.runtime.loop.validation import evaluating
    from determined_ds.trial.seeded_module import seed_layers

    found = []
    for case in cases:
        layers = [
            TiedLayerSpec("tokens", Tokens),
            *(LayerSpec(Block, index, case.dropout) for index in range(1, BLOCKS + 1)),
            halved,
            TiedLayerSpec("tokens", Tokens, forward_fn=head),
        ]
        engine = engine_of(case, layers, loss_of)
        replica = engine.grid.get_data_parallel_rank()
        seed_layers([engine], SEED, replica)
        losses, evaluated = [], []

        def evaluate(engine: Any = engine, evaluated: list[float] = evaluated) -> None:
            with evaluating([engine]):
                evaluated.append(float(engine.eval_batch(iter(tail_of()), num_micro_batches=len(tail_of()))))

        evaluate()
        for step in range(case.steps):
            torch.rand(engine.global_rank + 1)  # what a rank draws beside its layers changes nothing
            losses.append(float(engine.train_batch(iter(batches_of(case, step, replica)))))
        evaluate()
        weights = {
            name: parameter.detach().clone().float().numpy()
            for name, parameter in engine.module.named_parameters()
        }
        found.append(Trained(losses=losses, evaluated=evaluated, weights=weights))
        engine.destroy()
    return found
