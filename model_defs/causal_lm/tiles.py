"""Parts of a model computed tile by tile along the sequence, by DeepSpeed's ALST (arXiv 2506.13996), to hold less.

Each tile is computed again in the backward pass. Source: deepspeed 0.19.8 ``runtime/sequence_parallel/ulysses_sp.py``.
Its ``TiledFusedLogitsLoss`` is not used: it computes the head's gradient in the forward pass, before the loss is
divided by the accumulation and by other ranks' tokens; ``SequenceTiledCompute`` computes it in the backward pass.

Legend of shape suffixes: B batch, T tokens of a sequence, V vocabulary, C width.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.nn import functional

from model_defs.common.sections import config_error
from model_defs.common.text import IGNORED

# Their logits are the head's of the last hidden state, and their MLPs have neither dropout nor experts.
TYPES = ("llama", "mistral", "qwen2", "qwen3")


def check_tiles(config: Any, *, tiled_mlp: int, tiled_loss: int, lora: bool) -> None:
    """Check that a model can be computed in tiles.

    Args:
        config: The model's configuration.
        tiled_mlp: Tiles of each MLP; 1: it is computed whole.
        tiled_loss: Tiles of head and loss.
        lora: Whether adapters are trained.

    Raises:
        ConfigError: It cannot.
    """
    for name, tiles in (("tiled_mlp", tiled_mlp), ("tiled_loss", tiled_loss)):
        message = ""
        if tiles > 1 and config.model_type not in TYPES:
            message = f"tiles are tested with {', '.join(TYPES)}, and not with {config.model_type}."
        elif tiles > 1 and lora:
            message = "tiles are not tested with LoRA."
        elif tiles > 1 and name == "tiled_loss" and config.tie_word_embeddings:
            message = "a head tied to the embedding would have its gradient reduced before the embedding's is there."
        if message:
            raise config_error(f"hyperparameters.{name}", tiles, message, f"{name}: 1")


def tile_mlps(model: Any, tiles: int) -> None:
    """Have every MLP of a model compute tile by tile.

    Args:
        model: Of one of :data:`TYPES`.
        tiles: Along the sequence, at least 2.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP

    for name, module in model.named_modules():
        if name.endswith(".mlp"):
            plain = type(module).forward

            def tiled(hidden_BTC: Tensor, module: Any = module, plain: Any = plain) -> Any:
                return TiledMLP.apply(plain, module, hidden_BTC, tiles, list(module.parameters()))

            module.forward = tiled


def tile_loss(model: Any, tiles: int) -> None:
    """Have a model called with ``targets`` return the sum of the loss, without ever holding all logits.

    Args:
        model: Of one of :data:`TYPES`, its head not tied.
        tiles: Along the sequence, at least 2.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import sequence_tiled_compute

    decoder, head, plain = model.get_decoder(), model.get_output_embeddings(), model.forward

    def forward(*args: Any, targets: Tensor | None = None, **kwargs: Any) -> Any:
        if targets is None:
            return plain(*args, **kwargs)
        hidden_BTC = decoder(*args, **kwargs).last_hidden_state
        return sequence_tiled_compute(
            _loss_of_tile,
            hidden_BTC.shape[1],
            tiles,
            {"hidden_BTC": hidden_BTC, "targets_BT": targets},
            {"head": head},
            "hidden_BTC",
            compute_params=list(head.parameters()),
            output_unshard_dimension=0,
            output_reduction="sum",
        )

    model.forward = forward


def _loss_of_tile(hidden_BTC: Tensor, targets_BT: Tensor, head: Any) -> Tensor:
    logits = head(hidden_BTC).flatten(0, 1).float()
    return functional.cross_entropy(logits, targets_BT.flatten(), ignore_index=IGNORED, reduction="sum")
