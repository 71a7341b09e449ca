"""Real pipelines under every schedule, and the most that the tensors of their passes take at a time."""

from __future__ import annotations

from typing import Any

from determined_ds.memory.layers import LayerShape
from determined_ds.pipe.orders import Pipeline

VOCAB_SIZE = 64
LAYERS = {"blocks": 8, "hidden_size": 32, "length": 64}


def specs() -> list[Any]:
    """An embedding, residual blocks with attention's and a feed-forward's sizes, a head that is tied to it."""
    import torch
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from torch import nn

    hidden = LAYERS["hidden_size"]

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(hidden)
            self.up = nn.Linear(hidden, 4 * hidden)
            self.down = nn.Linear(4 * hidden, hidden)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

    def scores(embedding: nn.Embedding, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, embedding.weight)

    tied = {"key": "tokens", "typename": nn.Embedding}
    return [
        TiedLayerSpec(tied["key"], nn.Embedding, VOCAB_SIZE, hidden),
        *(LayerSpec(Block) for _ in range(LAYERS["blocks"])),
        LayerSpec(nn.LayerNorm, hidden),
        TiedLayerSpec(tied["key"], nn.Embedding, VOCAB_SIZE, hidden, forward_fn=scores),
    ]


def loss(outputs: Any, targets: Any) -> Any:
    import torch

    return torch.nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


def layer_shapes() -> tuple[LayerShape, ...]:
    """In a rank: the layers as the memory model has them."""
    import torch

    from determined_ds.runtime.shapes.bare_trial import chain_of
    from determined_ds.runtime.shapes.of_layers import try_to_measure_layers

    def batch(samples: int) -> tuple[Any, Any]:
        tokens = torch.zeros(samples, LAYERS["length"], dtype=torch.long, device="meta")
        return tokens, tokens

    with torch.device("meta"):
        chain = chain_of(specs())
    found, reasons = try_to_measure_layers(list(chain), batch, loss, "fp32")
    assert reasons == ()
    return found


def peak_bytes(pipe: Pipeline, samples: int) -> tuple[int, int]:
    """In a rank: train two steps.

    Returns:
        The most bytes of tensors that the passes of the second one make, gradients of the parameters included, by
        every storage that is made until it is freed; and the parameters of the rank.
    """
    import deepspeed
    import torch
    from deepspeed.runtime.pipe import schedule

    from determined_ds.devices import detect_accelerator
    from determined_ds.runtime.group.distributed import join_process_group
    from determined_ds.runtime.shapes.counting import LiveBytes
    from determined_ds.trial.ordered_engine import initialize
    from determined_ds.trial.ordered_module import made_module

    join_process_group(detect_accelerator("cpu"))
    torch.manual_seed(1)
    module = made_module(
        pipe, num_stages=pipe.ranks, layers=specs(), loss_fn=loss, partition_method="uniform"
    )
    config = {
        "train_micro_batch_size_per_gpu": samples,
        "gradient_accumulation_steps": pipe.micro_batches,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    }
    parameters = [each for each in module.parameters() if each.requires_grad]
    engine = initialize(model=module, model_parameters=parameters, config=config)
    tokens = torch.zeros(samples, LAYERS["length"], dtype=torch.long)
    batches = iter([(tokens, tokens)] * 3 * pipe.micro_batches)
    engine.train_batch(batches)
    most = []
    with LiveBytes([*module.parameters(), *module.buffers(), tokens]) as live:
        reduce = engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def at_end(self: Any, **more: Any) -> None:
            most.append(live.peak_bytes)
            reduce(self, **more)

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: at_end}
        engine.train_batch(batches)
    assert deepspeed.comm.is_initialized()
    return most[0], sum(each.numel() for each in parameters)
