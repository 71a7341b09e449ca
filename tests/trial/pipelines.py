"""A small language model as layers of a pipeline under any schedule, and the same by plain PyTorch in one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from tests.package import layer_seed, records, train_in_fp16_on_cpus, training_data
from tests.trial.regression import train, trial_class

WIDTH, VOCABULARY, TIME, BATCH, SEED = 8, 11, 3, 4, 7
BLOCKS = 13  # with embedding, function and head sixteen layers: four ranks of four parts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training."""

    schedule: str
    ranks: int = 2  # of one replica
    chunks: int = 1  # parts of a rank
    micro_batches: int = 4  # of a step and a replica
    replicas: int = 1  # pipelines beside each other
    zero: int = 0
    clipping: float = 0.5  # of the gradient's norm; 0: none
    interval: int = 0  # of activation checkpointing
    dropout: float = 0.3
    steps: int = 20
    more: dict[str, Any] = field(default_factory=dict)  # of the DeepSpeed JSON

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Of an experiment that trains it."""
        return {
            "global_batch_size": BATCH * self.micro_batches * self.replicas,
            "micro_batch_size": BATCH,
            "pipe_parallel_size": self.ranks,
            "pipe_schedule": self.schedule,
            "pipe_chunks": self.chunks if self.chunks > 1 else None,
            "trial_seed": SEED,
            "deepspeed_config": {
                "gradient_clipping": self.clipping,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": self.zero, "reduce_bucket_size": 10_000},
                **self.more,
            },
        }


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
    return hidden_BTW / 2


def head(layer: Tokens, hidden_BTW: torch.Tensor) -> torch.Tensor:
    return hidden_BTW @ layer.weight.T


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def samples(size: int, seed: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(VOCABULARY, (size, TIME), generator=generator) for _ in range(2))
    return torch.utils.data.TensorDataset(inputs, targets)


def data_of(case: Case) -> torch.utils.data.TensorDataset:
    """For three steps."""
    return samples(3 * case.hyperparameters["global_batch_size"], 1)


TAIL = samples(2 * BATCH + 1, 2)  # two micro-batches and a sample


class Trained(NamedTuple):
    """What a training has led to: the loss of each step, validations half-way and at the end, weights by name."""

    losses: list[float]
    evaluated: list[float]
    weights: dict[str, np.ndarray]


def plainly(case: Case) -> Trained:
    """By plain PyTorch, which seeds each layer as a pipeline does."""
    from determined_ds import DataLoader

    tokens = Tokens()
    blocks = [Block(index, case.dropout) for index in range(1, BLOCKS + 1)]
    layers = [tokens, *blocks, halved, lambda hidden: head(tokens, hidden)]
    named = {
        f"{index}.{name}": p for index, block in enumerate(blocks, 1) for name, p in block.named_parameters()
    }
    named["tied_modules.tokens.weight"] = tokens.weight
    optimizer = torch.optim.AdamW(named.values(), lr=0.01)
    data, split = data_of(case), (case.replicas, case.micro_batches, BATCH)
    streams = [
        training_data(DataLoader(data, batch_size=BATCH, shuffle=True), split, replica=each, seed=SEED)
        for each in range(case.replicas)
    ]

    def forward(inputs: Any, seeds: tuple[int, ...] | None) -> torch.Tensor:
        for block in blocks:
            block.train(seeds is not None)
        for index, layer in enumerate(layers):
            if seeds is not None:
                torch.random.default_generator.manual_seed(layer_seed(*seeds, index))
            inputs = layer(inputs)
        return inputs

    losses, evaluated = [], []
    for step in range(case.steps):
        optimizer.zero_grad()
        total = 0.0
        for replica, stream in enumerate(streams):
            for number in range(case.micro_batches):
                inputs, targets = next(stream.batches)
                outputs = forward(inputs, (SEED, replica, step, number))
                loss = loss_of(outputs, targets) / case.micro_batches / case.replicas
                loss.backward()
                total += loss.item()
        if case.clipping:
            torch.nn.utils.clip_grad_norm_(named.values(), case.clipping)
        optimizer.step()
        losses.append(total)
        if (step + 1) % (case.steps // 2) == 0:
            with torch.no_grad():
                evaluated.append(float(loss_of(forward(TAIL.tensors[0], None), TAIL.tensors[1])))
    weights = {name: parameter.detach().clone().float().numpy() for name, parameter in named.items()}
    return Trained(losses, evaluated, weights)


def pipeline_trial(layers: list[Any], loss: Any, partition: str = "uniform", **attributes: Any) -> Any:
    """A trial of these layers; what a rank draws beside them changes nothing."""

    class Drawing:
        def train_batch(self: Any, *given: Any) -> Any:
            torch.rand(self.context.distributed.rank + 1)
            return super().train_batch(*given)  # type: ignore[misc]

    methods = {"build_layers": lambda self: layers, "loss": lambda self, *given: loss(*given)}
    return trial_class("pipeline", Drawing, partition_method=partition, **methods, **attributes)


def in_rank(run_dir: Path, case: Case) -> dict[str, np.ndarray]:
    """In a rank: a training; of its weights, those that this rank holds."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from determined.pytorch import Batch

    if "fp16" in case.more:
        train_in_fp16_on_cpus()
    blocks = [LayerSpec(Block, index, case.dropout) for index in range(1, BLOCKS + 1)]
    ends = TiedLayerSpec("tokens", Tokens), TiedLayerSpec("tokens", Tokens, forward_fn=head)
    trial = pipeline_trial(
        [ends[0], *blocks, halved, ends[1]],
        loss_of,
        build_training_data_loader=lambda self: self.training_loader(data_of(case)),
        build_validation_data_loader=lambda self: self.validation_loader(TAIL),
        activation_checkpoint_interval=case.interval,
        checkpointable_layers=["Block"] if case.interval else None,
    )
    fit = {"validation_period": Batch(case.steps // 2), "checkpoint_policy": "none"}
    made = train(run_dir, trial, case.hyperparameters, steps=case.steps, **fit)
    parameters = made.engine.module.named_parameters()
    return {name: each.detach().clone().float().numpy() for name, each in parameters}


def trained(ranks: Any, run_dir: Path, case: Case) -> list[Trained]:
    """What each rank says of a training."""
    of_ranks = ranks.run(in_rank, run_dir, case)
    losses = [metrics["loss"] for _, metrics in records(run_dir, "training")]
    evaluated = [metrics["validation_loss"] for _, metrics in records(run_dir, "validation")]
    return [Trained(losses, evaluated, held) for held in of_ranks]
