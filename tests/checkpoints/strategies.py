"""One small language model under any strategy: trained by a loop, or its engines written and read without one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

WIDTH, VOCABULARY, BATCH, SAMPLES = 6, 11, 8, 48
BLOCKS = 6  # with embedding and head eight layers: two ranks of four parts, or four of two
# What is not of the DeepSpeed JSON is a hyperparameter, but for `engine` and `bf16`.
Strategy = Mapping[str, Any]


def zero(stage: int, **more: Any) -> dict[str, Any]:
    return {"zero": {"stage": stage, **more}}


def pipe(ranks: int, stage: int, schedule: str = "", **more: Any) -> dict[str, Any]:
    """A pipeline; of a schedule that needs them, as many micro-batches as there can be."""
    scheduled = {"pipe_schedule": schedule, "micro_batch_size": 1} if schedule else {}
    return {**zero(stage), "pipe_parallel_size": ranks, **scheduled, **more}


CPU = {"device": "cpu"}
ZERO: dict[str, Strategy] = {
    "ddp": {**zero(0), "engine": "ddp"},
    "zero0": zero(0),
    "zero1": zero(1),
    "zero2": zero(2),
    "zero3": zero(3, stage3_param_persistence_threshold=10),
    "offload2": zero(2, offload_optimizer=CPU),
    "offload3": zero(3, offload_optimizer=CPU, offload_param=CPU),
    "hpz": zero(3, zero_hpz_partition_size=2),
    **{f"bf16_zero{stage}": {**zero(stage), "bf16": True} for stage in range(4)},
    **{f"pipe{ranks}": pipe(ranks, 0) for ranks in (2, 4)},
    **{f"pipe{ranks}_zero1": pipe(ranks, 1) for ranks in (2, 4)},
    "pipe2_within_machine": pipe(2, 1, pipe_within_machine=True),
    "gpipe": pipe(2, 1, "gpipe"),
    "zb-h1": pipe(2, 0, "zb-h1"),
    "zb-h1_zero1": pipe(4, 1, "zb-h1"),
    "interleaved": pipe(2, 0, "interleaved", pipe_chunks=2),
    "interleaved4": pipe(2, 1, "interleaved", pipe_chunks=4),
    "interleaved_4ranks": pipe(4, 1, "interleaved", pipe_chunks=2),
    "dualpipev": pipe(2, 0, "dualpipev"),
    "dualpipev_zero1": pipe(2, 1, "dualpipev"),
    "dualpipev_4ranks": pipe(4, 1, "dualpipev"),
    **{f"tensor2_zero{stage}": {**zero(stage), "model_parallel_size": 2} for stage in range(4)},
    "tensor4_zero1": {**zero(1), "model_parallel_size": 4},
    "bf16_tensor2_zero1": {**zero(1), "model_parallel_size": 2, "bf16": True},
}
# 13 rows over two ranks: 7 and 6.
CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [r".*\.inner\.weight$"], "partition_type": "column"},
        {"patterns": [r".*\.(frozen|adapter)\.weight$"], "partition_type": "row"},
    ],
}
# Two engines.
PAIRS: dict[str, Strategy] = {
    f"{one} and {other}": {
        **zero(one),
        "other_overwrite_deepspeed_args": {"zero_optimization": {"stage": other}},
    }
    for one, other in ((1, 3), (0, 2), (3, 0), (2, 1), (1, 1), (3, 3))
}


class Embedding(torch.nn.Module):
    """Tokens to vectors; the head has the same weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(VOCABULARY, WIDTH))
        self.weight.use_muon = False  # type: ignore[attr-defined]

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(tokens, self.weight)


def head(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
    return x @ layer.weight.T


class Block(torch.nn.Module):
    """A residual block with a frozen projection, an adapter of it, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(WIDTH, 2 * WIDTH + 1)
        self.frozen = torch.nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.frozen.weight.requires_grad_(False)
        self.adapter = torch.nn.Linear(2 * WIDTH + 1, WIDTH, bias=False)
        self.register_buffer("scale", torch.zeros(WIDTH))

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
        return head(self.tokens, x)


def whole_name(name: str) -> str:
    """The name in :class:`Whole` of a parameter or buffer, of either form."""
    first, rest = name.split(".", 1)
    if first in ("tied_modules", "0", str(BLOCKS + 1)):
        return f"whole.tokens.{rest.removeprefix('tokens.')}"
    return f"whole.blocks.{int(first) - 1}.{rest}" if first.isdigit() else f"whole.{name}"


def names_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    named = (*module.named_parameters(), *module.named_buffers())
    return {whole_name(name): tensor for name, tensor in named}


def fill(module: torch.nn.Module, hparams: Mapping[str, Any], engine: int = 0) -> None:
    """The same first weights in either form: of a checkpoint ``begin_with``, or drawn, others for another ``draw``."""
    from determined_ds import load_state_dict_from_checkpoint_path

    path = hparams.get("begin_with")
    given = load_state_dict_from_checkpoint_path(path, engine=engine) if path else {}
    weights = {whole_name(name): tensor for name, tensor in given.items()}
    with torch.no_grad():
        for name, tensor in names_of(module).items():
            seed = sum(ord(letter) * (at + 1) for at, letter in enumerate(name))
            generator = torch.Generator().manual_seed(seed + engine + hparams.get("draw", 0))
            drawn = 0.3 * torch.randn(tensor.shape, generator=generator)
            tensor.copy_(weights[name] if path else drawn)


def trial_class(strategy: Strategy) -> Any:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    from determined_ds import DataParallelTrial, PipelineTrial, SeveralEnginesTrial

    class Common:
        context: Any

        def build_parameters(self, model: torch.nn.Module) -> Any:
            """All that require a gradient, but for one that nothing trains, where a test asks for it."""
            left_out = self.context.get_hparams().get("untrained")
            return [t for name, t in names_of(model).items() if t.requires_grad and name != left_out]

        def weight_names(self, model: torch.nn.Module) -> dict[str, torch.Tensor]:
            return names_of(model)

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            logits, targets = model(batch[0]), batch[1]
            return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

        def build_training_data_loader(self: Any) -> Any:
            tokens = torch.randint(VOCABULARY, (SAMPLES, 5), generator=torch.Generator().manual_seed(0))
            return self.training_loader(torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:]))

        def build_validation_data_loader(self: Any) -> Any:
            return self.validation_loader(self.build_training_data_loader().dataset)

    class Replicated(Common, DataParallelTrial):
        def build_model(self) -> torch.nn.Module:
            model = Whole()
            fill(model, self.context.get_hparams())
            return model

    class Staged(Common, PipelineTrial):
        partition_method = "uniform"

        def build_layers(self) -> list[Any]:
            blocks = [LayerSpec(Block) for _ in range(BLOCKS)]
            end = TiedLayerSpec("tokens", Embedding)
            return [end, *blocks, TiedLayerSpec("tokens", Embedding, forward_fn=head)]

        def load_weights(self, module: Any) -> None:
            fill(module, self.context.get_hparams())

        def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(outputs.float().flatten(0, 1), targets.flatten())

    class Pair(Common, SeveralEnginesTrial):
        def build_models(self) -> dict[str, torch.nn.Module]:
            models = {"one": Whole(), "other": Whole()}
            for number, model in enumerate(models.values()):
                fill(model, self.context.get_hparams(), number)
            return models

        def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> dict[str, Any]:
            batch, losses = self.context.to_device(next(dataloader_iter)), []
            for engine in self.engines.values():
                losses.append(self.loss(engine, batch))
                engine.backward(losses[-1])
                engine.step()
            return {"loss": torch.stack(losses).detach().mean()}

        def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
            return {"validation_loss": self.loss(self.engine, self.context.to_device(next(dataloader_iter)))}

    if "other_overwrite_deepspeed_args" in strategy:
        return Pair
    return Staged if "pipe_parallel_size" in strategy else Replicated


def hyperparameters(strategy: Strategy, **more: Any) -> dict[str, Any]:
    """Of a training under a strategy; more of them, or in the place of these."""
    ds_config: dict[str, Any] = {
        "zero_optimization": {"reduce_bucket_size": 64, **strategy["zero"]},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.02, "weight_decay": 0.1, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.02, "warmup_num_steps": 6}},
        "zero_force_ds_cpu_optimizer": False,
        "gradient_clipping": 1.0,
        **({"bf16": {"enabled": True}} if "bf16" in strategy else {}),
        **({"tensor_parallel": {"partition_config": CUT}} if "model_parallel_size" in strategy else {}),
    }
    own = {name: value for name, value in strategy.items() if name not in ("zero", "bf16", "engine")}
    return {"global_batch_size": BATCH, "deepspeed_config": ds_config, **more, **own}


def run(
    strategy: Strategy,
    run_dir: Path,
    *,
    read: Path | None = None,
    write: Path | None = None,
    first: int = 0,
    steps: int = 0,
    then: int = 0,
    **more: Any,
) -> list[float]:
    """Read engines, train some steps, write, and train some more; the losses of all steps, equal on all ranks."""
    import torch.distributed as dist

    from determined_ds import open_context
    from tests.package import load_engines, save_engines

    hparams, engine = hyperparameters(strategy, **more), strategy.get("engine", "deepspeed")
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu", engine=engine) as context:
        trial = trial_class(strategy)(context)
        replicas, size = context.resolved.topology.data_parallel_world_size, context.resolved.batch
        replica = context._mpu.data_parallel_rank

        def trained(step: int) -> float:
            generator = torch.Generator().manual_seed(1000 + step)
            tokens = torch.randint(VOCABULARY, (BATCH, 5), generator=generator)
            micro = tokens.chunk(replicas)[replica].split(size.micro_batch_size)
            mine = iter([(part[:, :-1], part[:, 1:]) for part in micro])
            calls = 1 if "pipe_parallel_size" in strategy else len(micro)
            loss = sum(trial.train_batch(mine, 0, step)["loss"].float() for _ in range(calls)) / calls
            dist.all_reduce(loss)
            return float(loss) / context.distributed.size

        if read is not None:
            load_engines(trial, context, read)
        losses = [trained(step) for step in range(first, first + steps)]
        if write is not None:
            save_engines(trial, context, write)
        return losses + [trained(step) for step in range(first + steps, first + steps + then)]
