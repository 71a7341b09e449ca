"""One small language model under any strategy, and its checkpoints' engines written and read without a loop around.

Runs inside ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

WIDTH, VOCABULARY, BATCH = 6, 11, 8
BLOCKS = 6  # with embedding and head eight layers: two ranks of four parts, or four of two

ZERO: dict[str, dict[str, Any]] = {
    "ddp": {"engine": "ddp", "zero": {"stage": 0}},
    "zero0": {"zero": {"stage": 0}},
    "zero1": {"zero": {"stage": 1}},
    "zero2": {"zero": {"stage": 2}},
    "zero3": {"zero": {"stage": 3, "stage3_param_persistence_threshold": 10}},
    "offload2": {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
    "offload3": {
        "zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    },
    "hpz": {"zero": {"stage": 3, "zero_hpz_partition_size": 2}},
    "bf16_zero0": {"zero": {"stage": 0}, "bf16": True},
    "bf16_zero1": {"zero": {"stage": 1}, "bf16": True},
    "bf16_zero2": {"zero": {"stage": 2}, "bf16": True},
    "bf16_zero3": {"zero": {"stage": 3}, "bf16": True},
    "pipe1": {"zero": {"stage": 0}, "pipe": 1},
    "pipe1_zero1": {"zero": {"stage": 1}, "pipe": 1},
    "pipe2": {"zero": {"stage": 0}, "pipe": 2},
    "pipe2_zero1": {"zero": {"stage": 1}, "pipe": 2},
    "pipe4": {"zero": {"stage": 0}, "pipe": 4},
    "pipe4_zero1": {"zero": {"stage": 1}, "pipe": 4},
    "pipe2_within_machine": {"zero": {"stage": 1}, "pipe": 2, "within": True},
    "gpipe": {"zero": {"stage": 1}, "pipe": 2, "schedule": "gpipe"},
    "zb-h1": {"zero": {"stage": 0}, "pipe": 2, "schedule": "zb-h1"},
    "zb-h1_zero1": {"zero": {"stage": 1}, "pipe": 4, "schedule": "zb-h1"},
    "interleaved": {"zero": {"stage": 0}, "pipe": 2, "schedule": "interleaved", "chunks": 2},
    "interleaved4": {"zero": {"stage": 1}, "pipe": 2, "schedule": "interleaved", "chunks": 4},
    "interleaved_4ranks": {"zero": {"stage": 1}, "pipe": 4, "schedule": "interleaved", "chunks": 2},
    "dualpipev": {"zero": {"stage": 0}, "pipe": 2, "schedule": "dualpipev"},
    "dualpipev_zero1": {"zero": {"stage": 1}, "pipe": 2, "schedule": "dualpipev"},
    "dualpipev_4ranks": {"zero": {"stage": 1}, "pipe": 4, "schedule": "dualpipev"},
    **{f"tensor2_zero{stage}": {"zero": {"stage": stage}, "tensor": 2} for stage in range(4)},
    "tensor4_zero1": {"zero": {"stage": 1}, "tensor": 4},
    "bf16_tensor2_zero1": {"zero": {"stage": 1}, "tensor": 2, "bf16": True},
}
# 13 rows over two ranks: 7 and 6.
CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.inner\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(frozen|adapter)\.weight$"], "partition_type": "row"},
    ],
}
# Two engines: "other" is the second one's.
PAIRS: dict[str, dict[str, Any]] = {
    "1 and 3": {"zero": {"stage": 1}, "other": {"stage": 3}},
    "0 and 2": {"zero": {"stage": 0}, "other": {"stage": 2}},
    "3 and 0": {"zero": {"stage": 3}, "other": {"stage": 0}},
    "2 and 1": {"zero": {"stage": 2}, "other": {"stage": 1}},
}


class Embedding(torch.nn.Module):
    """Tokens to vectors; the head has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
        self.weight.use_muon = False  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight)


class Block(torch.nn.Module):
    """A residual block with a frozen projection, an adapter of it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.frozen = torch.nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.adapter = torch.nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = torch.tanh(self.inner(x))
        return x + self.scale.to(x.dtype) * (self.frozen(inner) + self.adapter(inner))


class Whole(torch.nn.Module):
    """The model on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = Embedding()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return x @ self.tokens.weight.T


def head(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


def names_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The name in :class:`Whole` -> parameter or buffer, of either form."""
    found: dict[str, torch.Tensor] = {}
    for name, parameter in (*module.named_parameters(), *module.named_buffers()):
        if not name[0].isdigit() and not name.startswith("tied_modules"):
            found[f"whole.{name}"] = parameter
        elif name.startswith("tied_modules"):
            found["whole.tokens.weight"] = parameter
        else:
            index, rest = name.split(".", 1)
            found[f"whole.blocks.{int(index) - 1}.{rest}"] = parameter
    return found


def fill(module: torch.nn.Module, more: int = 0) -> None:
    """The same first weights in either form; with another number, others."""
    with torch.no_grad():
        for name, parameter in names_of(module).items():
            if not isinstance(parameter, torch.nn.Parameter):
                continue
            seed = more + sum(ord(letter) * (at + 1) for at, letter in enumerate(name))
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())


def trial_class(strategy: Mapping[str, Any]) -> Any:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial

    class Common:
        def build_parameters(self, model: torch.nn.Module) -> Any:
            """All that require a gradient, but for one that nothing trains, where a test asks for it."""
            left_out = self.context.get_hparams().get("untrained")  # type: ignore[attr-defined]
            named = names_of(model).items()
            return [each for name, each in named if each.requires_grad and name != left_out]

        def weight_names(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
            return names_of(model)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return loss_of(model(batch[0]), batch[1])

        def build_training_data_loader(self) -> Any:
            return None

        build_validation_data_loader = build_training_data_loader

    class Replicated(Common, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            model = Whole()
            fill(model)
            return model

    class Staged(Common, PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            blocks = [LayerSpec(Block) for _ in range(BLOCKS)]
            ends = [TiedLayerSpec("tokens", Embedding), TiedLayerSpec("tokens", Embedding, forward_fn=head)]
            return [ends[0], *blocks, ends[1]]

        def load_weights(self, module: Any) -> None:
            fill(module)

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return loss_of(outputs, targets)

    class Pair(Common, SeveralEnginesTrial):
        train_batch = evaluate_batch = None  # :func:`run` trains

        def build_models(self) -> dict[str, torch.nn.Module]:
            models = {"one": Whole(), "other": Whole()}
            for more, model in enumerate(models.values()):
                fill(model, more)
            return models

    if "other" in strategy:
        return Pair
    return Staged if "pipe" in strategy else Replicated


def config_of(strategy: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    half = {"bf16": {"enabled": True}} if strategy.get("bf16") else {}
    optimizer = {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}}
    return {
        "zero_optimization": {"reduce_bucket_size": 64, **strategy["zero"]},
        "optimizer": optimizer,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        **half,
        **({"tensor_parallel": {"partition_config": CUT}} if "tensor" in strategy else {}),
        **more,
    }


def batches(step: int, replica: int, replicas: int, micro: int) -> Iterator[Any]:
    """A replica's micro-batches of a step: the samples of a step are the same for any number of replicas."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (BATCH, 5), generator=generator)
    own = tokens[replica * BATCH // replicas : (replica + 1) * BATCH // replicas]
    for part in own.split(micro):
        yield part[:, :-1], part[:, 1:]


def run(
    strategy: Mapping[str, Any],
    run_dir: str,
    *,
    read: str | None = None,
    write: str | None = None,
    first: int = 0,
    steps: int = 0,
    micro: int | None = None,
    untrained: str | None = None,
    **ds_config: Any,
) -> list[float]:
    """Train some steps between reading and writing; the losses, equal on all ranks."""
    import torch.distributed as dist

    from determined_ds import open_context
    from tests.package import load_engines, save_engines

    hparams = {"global_batch_size": BATCH, "deepspeed_config": config_of(strategy, **ds_config)}
    hparams |= {"pipe_parallel_size": strategy.get("pipe", 1), "untrained": untrained}
    if "within" in strategy:
        hparams["pipe_within_machine"] = True
    if "schedule" in strategy:
        micro = 1  # as many of them as any schedule needs
        hparams |= {"pipe_schedule": strategy["schedule"], "pipe_chunks": strategy.get("chunks")}
    hparams |= {"model_parallel_size": strategy.get("tensor", 1)}
    if "other" in strategy:
        hparams["other_overwrite_deepspeed_args"] = {"zero_optimization": strategy["other"]}
    if micro is not None:
        hparams["deepspeed_config"]["train_micro_batch_size_per_gpu"] = micro
    engine = strategy.get("engine", "deepspeed")
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine=engine) as context:
        trial = trial_class(strategy)(context)
        if read is not None:
            load_engines(trial, context, Path(read))
        topology = context.resolved.topology
        replicas = topology.data_parallel_world_size
        replica = context._mpu.data_parallel_rank
        size = context.resolved.batch.micro_batch_size
        losses = []
        for step in range(first, first + steps):
            mine = batches(step, replica, replicas, size)
            if "pipe" in strategy:
                loss = trial.engine.train_batch(data_iter=mine).detach().clone().float()
            else:
                parts = []
                for batch, engine in itertools.product(mine, context.models):
                    part = trial.loss(engine, batch)
                    engine.backward(part)
                    engine.step()
                    parts.append(part.detach().float())
                loss = torch.stack(parts).mean()
                if context.distributed.size > 1:
                    dist.all_reduce(loss)
                loss /= context.distributed.size
            losses.append(float(loss))
        if write is not None:
            save_engines(trial, context, Path(write))
    return losses
