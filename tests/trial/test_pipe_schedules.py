"""Every schedule of a pipeline trains as plain PyTorch does: losses and validations to 1e-5."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness.ranks import Ranks, RanksFailed, RanksOf
from tests.package import built_seed, layer_seed, records, train_in_fp16_on_cpus, training_data
from tests.trial.regression import train, trial_class

WIDTH, VOCABULARY, TIME, BATCH, SEED = 8, 11, 3, 4, 7
BLOCKS = 13  # with embedding, function and head sixteen layers: four ranks of four parts


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training: ranks of a replica, parts of a rank, micro-batches of a step and a replica, ..."""

    schedule: str
    ranks: int = 2
    chunks: int = 1
    micro_batches: int = 4
    replicas: int = 1
    zero: int = 0
    partition: str = "uniform"
    clipping: float = 0.5
    interval: int = 0  # of activation checkpointing
    dropout: float = 0.3
    steps: int = 20
    more: dict[str, Any] = field(default_factory=dict)  # of the DeepSpeed JSON

    @property
    def hyperparameters(self) -> dict[str, Any]:
        return {
            "global_batch_size": BATCH * self.micro_batches * self.replicas,
            "micro_batch_size": BATCH,
            "pipe_parallel_size": self.ranks,
            "pipe_schedule": self.schedule,
            "pipe_chunks": self.chunks if self.chunks > 1 else None,
            "partition_method": self.partition,
            "trial_seed": SEED,
            "deepspeed_config": {
                "gradient_clipping": self.clipping,
                "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
                "zero_optimization": {"stage": self.zero, "reduce_bucket_size": 10_000},
                **self.more,
            },
        }


class Tokens(torch.nn.Module):
    """Embedding and head have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(VOCABULARY, WIDTH) / 3)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens_BT, self.weight)


class Block(torch.nn.Module):
    """A residual block with dropout, a weight that is used twice, and an output that is a view."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.inner = torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.out, self.dropout = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Dropout(dropout)

    def forward(self, hidden_BTW: torch.Tensor) -> torch.Tensor:
        inner = self.inner(torch.tanh(self.inner(self.norm(hidden_BTW))))
        return (hidden_BTW + self.dropout(self.out(inner))).view(-1, TIME, WIDTH)


def head(layer: Tokens, hidden_BTW: torch.Tensor) -> torch.Tensor:
    return hidden_BTW @ layer.weight.T


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def samples(size: int, seed: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = (torch.randint(VOCABULARY, (size, TIME), generator=generator) for _ in range(2))
    return torch.utils.data.TensorDataset(inputs, targets)


def data_of(case: Case) -> torch.utils.data.TensorDataset:
    return samples(3 * case.hyperparameters["global_batch_size"], 1)  # for three steps


TAIL = samples(2 * BATCH + 1, 2)  # two micro-batches and a sample
# Losses of steps; validations half-way and at the end.
Trained = tuple[list[float], list[float]]


def plainly(case: Case) -> Trained:
    """By plain PyTorch, which seeds each layer as a pipeline does, before it is built and before each pass."""
    from determined_ds import DataLoader

    def built(layer: int) -> Any:
        torch.random.default_generator.manual_seed(built_seed(SEED, layer))
        return Block(case.dropout) if layer else Tokens()

    tokens, *blocks = map(built, range(BLOCKS + 1))
    layers = [tokens, *blocks, torch.tanh, lambda hidden: head(tokens, hidden)]
    whole = torch.nn.Sequential(*layers[: BLOCKS + 1])
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.01)
    data, split = data_of(case), (case.replicas, case.micro_batches, BATCH)
    streams = [
        training_data(DataLoader(data, batch_size=BATCH, shuffle=True), split, replica=each, seed=SEED)
        for each in range(case.replicas)
    ]

    def forward(inputs: Any, seeds: tuple[int, ...] | None) -> torch.Tensor:
        whole.train(seeds is not None)
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
            torch.nn.utils.clip_grad_norm_(whole.parameters(), case.clipping)
        optimizer.step()
        losses.append(total)
        if (step + 1) % (case.steps // 2) == 0:
            with torch.no_grad():
                evaluated.append(float(loss_of(forward(TAIL.tensors[0], None), TAIL.tensors[1])))
    return losses, evaluated


def pipeline_trial(layers: list[Any], loss: Any, **attributes: Any) -> Any:
    """A trial of these layers; what a rank draws beside them changes nothing."""

    class Drawing:
        def train_batch(self: Any, *given: Any) -> Any:
            torch.rand(self.context.distributed.rank + 1)
            return super().train_batch(*given)  # type: ignore[misc]

    methods = {"build_layers": lambda self: layers, "loss": lambda self, *given: loss(*given)}
    return trial_class("pipeline", Drawing, **methods, **attributes)


def in_rank(run_dir: Path, case: Case) -> None:
    """In a rank: a training."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if "fp16" in case.more:
        train_in_fp16_on_cpus()
    blocks = [LayerSpec(Block, case.dropout) for _ in range(BLOCKS)]
    ends = TiedLayerSpec("tokens", Tokens), TiedLayerSpec("tokens", Tokens, forward_fn=head)
    trial = pipeline_trial(
        [ends[0], *blocks, torch.tanh, ends[1]],
        loss_of,
        build_training_data_loader=lambda self: self.training_loader(data_of(case)),
        build_validation_data_loader=lambda self: self.validation_loader(TAIL),
        activation_checkpoint_interval=case.interval,
        checkpointable_layers=["Block"] if case.interval else None,
    )
    fit = {"validation_period": ("batches", case.steps // 2), "checkpoint_policy": "none"}
    train(run_dir, trial, case.hyperparameters, steps=case.steps, **fit)


def trained(ranks: Ranks, run_dir: Path, case: Case) -> Trained:
    """What comes of a training."""
    ranks.run(in_rank, run_dir, case)
    losses = [metrics["loss"] for _, metrics in records(run_dir, "training")]
    return losses, [metrics["validation_loss"] for _, metrics in records(run_dir, "validation")]


SCHEDULES = (
    ("1f1b", 1),
    ("gpipe", 1),
    ("interleaved", 2),
    ("interleaved", 4),
    ("dualpipev", 2),
    ("zb-h1", 1),
)


def cases_of(schedule: str, chunks: int) -> list[Case]:
    """On two ranks; one pipeline of four stages; two replicas of two."""
    case = Case(schedule=schedule, chunks=chunks)
    return [
        case,
        replace(case, zero=1, clipping=0.0, micro_batches=8),
        replace(case, zero=1, dropout=0.0, interval=0 if schedule == "zb-h1" else 1),
        replace(case, ranks=4, micro_batches=8),
        replace(case, replicas=2, zero=1),
    ]


MORE = pytest.mark.long("more parts, ranks, replicas and settings: the short case has some of each")
SHORT = [
    Case(schedule="interleaved", chunks=2, interval=2),
    Case(schedule="zb-h1", zero=1, partition="type:block"),
]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(SHORT, id="short"),
        *(pytest.param(cases_of(*each), id="-".join(map(str, each)), marks=MORE) for each in SCHEDULES),
    ],
)
def test_it_trains_as_plain_pytorch(ranks_of: RanksOf, tmp_path: Path, cases: list[Case]) -> None:
    """Tied weights, functions, dropout, accumulation, clipping, validation with a tail; first weights of any cut."""
    for number, case in enumerate(cases):
        ranks = ranks_of(case.ranks * case.replicas)
        losses, evaluated = trained(ranks, tmp_path / str(number), case)
        expected = plainly(case)
        assert losses == pytest.approx(expected[0], abs=1e-5), case
        assert evaluated == pytest.approx(expected[1], abs=1e-5), case


BF16 = {"bf16": {"enabled": True}}
SETTINGS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16": (0, BF16),
    "bf16, ZeRO 1": (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "fp16, ZeRO 1": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
}


@pytest.mark.long("each way in which an optimizer takes gradients; in fp32 above")
@pytest.mark.parametrize("setting", SETTINGS)
def test_every_precision_trains_as_1f1b_does(two_ranks: Ranks, tmp_path: Path, setting: str) -> None:
    """To the bit, with the same parts."""
    zero, more = SETTINGS[setting]
    cases = [Case(schedule=name, zero=zero, more=more, steps=6) for name in ("1f1b", "zb-h1")]
    expected, own = (trained(two_ranks, tmp_path / case.schedule, case) for case in cases)
    assert expected[1][1] < expected[1][0]
    assert own == expected


class Handing(torch.nn.Module):
    """Hands on integers, truth values and a view, as a model does that is cut where its padding is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.full((WIDTH,), 0.5))

    def forward(self, inputs: Any) -> Any:
        hidden, places, mask = inputs if isinstance(inputs, tuple) else (inputs, torch.arange(TIME), None)
        mask = hidden > 0 if mask is None else mask
        hidden = (hidden * self.weight + places.unsqueeze(-1)) * mask
        return hidden.transpose(0, 1).contiguous().transpose(0, 1), places + 1, mask


def first_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(outputs[0], targets)


def handed_on(run_dir: Path, case: Case, sizes: list[int]) -> tuple[float, float]:
    """In a rank: the loss of a step in a pipeline, and by plain PyTorch."""
    from determined_ds import open_context

    with open_context(hparams=case.hyperparameters, run_dir=run_dir, accelerator="cpu") as context:
        layers, interval = [Handing() for _ in range(4)], case.interval
        engine = pipeline_trial(layers, first_of, activation_checkpoint_interval=interval)(context).engine
        given = [(torch.linspace(-1, 1, size * TIME * WIDTH).view(size, TIME, WIDTH),) * 2 for size in sizes]
        plain = torch.nn.Sequential(*(Handing() for _ in range(4)))
        expected = sum(first_of(plain(inputs), targets).item() for inputs, targets in given) / len(given)
        return float(engine.train_batch(iter(given))), expected


@pytest.mark.parametrize("case", [Case(schedule="interleaved", chunks=2), Case(schedule="zb-h1")])
def test_tensors_of_several_types_pass_between_stages(two_ranks: Ranks, tmp_path: Path, case: Case) -> None:
    for own, expected in two_ranks.run(handed_on, tmp_path, case, [BATCH] * 4):
        assert own == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("case", "sizes", "said"),
    [
        # Through the middle of 1F1B only floats pass: integers would arrive as something else.
        (Case(schedule="1f1b", ranks=4), [BATCH] * 4, r"stage 0 sends torch\.bool, torch\.int64"),
        (Case(schedule="gpipe"), [BATCH] * 3 + [1], r"of \(1, 3, 8\), .* after one of \(4, 3, 8\)"),
        (Case(schedule="zb-h1", interval=1), [BATCH] * 4, r"MyPipeline\.activation_checkpoint_interval = 1"),
    ],
)
def test_what_only_the_trial_shows_is_refused(
    ranks_of: RanksOf, tmp_path: Path, case: Case, sizes: list[int], said: str
) -> None:
    with pytest.raises(RanksFailed, match=said):
        ranks_of(case.ranks).run(handed_on, tmp_path, case, sizes)
