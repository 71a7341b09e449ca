"""GPT-2 in two forms over the same weights: one model, or a list of layers for a pipeline.

Both forms run the same ``transformers`` blocks in the same order, and every parameter has one canonical name,
the one that Hugging Face gives it. Initial weights and checkpoints go by that name, so a run does not depend
on how the model is cut.

Legend of shape suffixes: B batch, T tokens of a sequence, V vocabulary, C embedding width.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import transformers
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from model_defs.common.parameters import generator_of
from model_defs.common.sections import Section, config_error

# The sizes of the paper, as published on the Hugging Face hub; "tiny" is ours, for tests and laptops.
MODEL_SIZES: dict[str, dict[str, int]] = {
    "tiny": {"n_layer": 4, "n_embd": 128, "n_head": 4},
    "small": {"n_layer": 12, "n_embd": 768, "n_head": 12},
    "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
    "large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
    "xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
}
PUBLISHED_VOCAB_SIZE = 50257
PUBLISHED_POSITIONS = 1024


class Options(Section):
    """The hyperparameters that this model reads."""

    model_size: Literal["tiny", "small", "medium", "large", "xl"] = "tiny"
    """One of :data:`MODEL_SIZES`."""
    sequence_length: int = Field(128, ge=1)
    """T, the longest sequence that is trained on. The published sizes keep room for 1024, so that weights fit."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Of embeddings, attention and residual paths alike."""
    vocab_size: int | None = Field(None, ge=1)
    """V; None: the tokens of the tokenizer. More of them leaves rows unused, as in a multiple of 64."""
    pretrained: str | None = Field(None, min_length=1)
    """Folder or hub name of a checkpoint to start from; None: random weights, drawn by the seed."""
    activation_checkpointing: bool | None = None
    """Compute blocks again in the backward pass: false, none; true, as the interval says, or each by itself."""
    activation_checkpoint_interval: int = Field(0, ge=0)
    """Blocks of which only the input is kept, to be computed again together in the backward pass; 0: none."""


def gpt2_config(options: Options, *, num_tokens: int, attention: str = "sdpa") -> transformers.GPT2Config:
    """The configuration of a GPT-2.

    Args:
        options: What to build.
        num_tokens: Of the tokenizer; V is at least as many.
        attention: The attention kernel, by transformers' name.

    Raises:
        ConfigError: ``vocab_size`` is less than that.
    """
    vocab_size, positions = options.vocab_size or num_tokens, options.sequence_length
    if vocab_size < num_tokens:
        message, fix = (
            f"must be at least {num_tokens}, the tokens of the tokenizer.",
            f"vocab_size: {num_tokens}",
        )
        raise config_error("hyperparameters.vocab_size", vocab_size, message, fix)
    # Ids that lie outside the vocabulary would be saved with the model and mislead its users.
    end_of_text = vocab_size - 1 if vocab_size == PUBLISHED_VOCAB_SIZE else None
    return transformers.GPT2Config(
        **MODEL_SIZES[options.model_size],
        vocab_size=vocab_size,
        n_positions=positions if options.model_size == "tiny" else max(positions, PUBLISHED_POSITIONS),
        embd_pdrop=options.dropout,
        attn_pdrop=options.dropout,
        resid_pdrop=options.dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
        attn_implementation=attention,
    )


class GPT2(transformers.GPT2LMHeadModel):
    """The whole model, for data parallel training. Its ``state_dict`` is Hugging Face's own, head tied.

    Attributes:
        activation_checkpoint_interval: In training, of so many blocks only the input is kept, and they are
            computed again together in the backward pass; 0: everything is kept.
    """

    activation_checkpoint_interval = 0
    huggingface_prefix = ""

    def forward(self, tokens_BT: Tensor, positions_T: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Logits of the next token.

        Not the parent's forward: that one builds masks for padding, packing and caches, which costs a device
        synchronisation in every step; training on full windows needs only causal attention. The blocks called
        are the same.

        Args:
            tokens_BT: int64 token ids in [0, V), T at most ``config.n_positions``.
            positions_T: Of the tokens, where they are a slice of a sequence; None: from 0.

        Returns:
            logits_BTV.
        """
        inner = self.transformer
        if positions_T is None:
            positions_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        hidden_BTC = inner.drop(inner.wte(tokens_BT) + inner.wpe(positions_T))
        interval = self.activation_checkpoint_interval if self.training else 0
        # Reentrant: torch's other form compares tensors then and now, and ZeRO 3 takes parameters away between.
        for start in range(0, len(inner.h), interval or len(inner.h)):
            run = nn.Sequential(*inner.h[start : start + (interval or len(inner.h))])
            hidden_BTC = checkpoint(run, hidden_BTC, use_reentrant=True) if interval else run(hidden_BTC)
        return self.lm_head(inner.ln_f(hidden_BTC))


class TokenEmbedding(nn.Embedding):
    """Pipeline layer: tokens_BT -> hidden_BTC.

    Holds the tied weight and nothing else. DeepSpeed builds a tied layer whole on the first *and* the last
    pipeline stage, and keeps only the named weight in step; anything else in here would live twice, one copy
    of it untrained.
    """

    huggingface_prefix = "transformer.wte."

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config.vocab_size, config.n_embd)


def tied_head(embedding: TokenEmbedding, hidden_BTC: Tensor) -> Tensor:
    """The head: logits_BTV by the token embedding's own weight. ``forward_fn`` of a ``TiedLayerSpec``."""
    return functional.linear(hidden_BTC, embedding.weight)


class PositionEmbedding(nn.Module):
    """Pipeline layer: hidden_BTC -> hidden_BTC, with the positions added and dropout applied."""

    huggingface_prefix = "transformer."

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__()
        self.wpe = nn.Embedding(config.n_positions, config.n_embd)
        self.drop = nn.Dropout(config.embd_pdrop)

    def forward(self, hidden_BTC: Tensor) -> Tensor:
        # Positions are made here: integer tensors do not travel between pipeline stages.
        positions_T = torch.arange(hidden_BTC.shape[1], device=hidden_BTC.device)
        return self.drop(hidden_BTC + self.wpe(positions_T))


class Block(GPT2Block):
    """Pipeline layer: hidden_BTC -> hidden_BTC, one transformer block.

    Args:
        config: The model's configuration; attention is ``sdpa``, which is causal where no mask is given.
        layer_idx: Place of the block in the model, from 0.
    """

    def __init__(self, config: transformers.GPT2Config, layer_idx: int) -> None:
        super().__init__(config, layer_idx=layer_idx)
        self.huggingface_prefix = f"transformer.h.{layer_idx}."

    def forward(self, hidden_BTC: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(hidden_BTC)


class FinalNorm(nn.LayerNorm):
    """Pipeline layer: hidden_BTC -> hidden_BTC, the last layer norm."""

    huggingface_prefix = "transformer.ln_f."

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__(config.n_embd, eps=config.layer_norm_epsilon)


def pipeline_layers(config: transformers.GPT2Config) -> list[LayerSpec]:
    """The model as layers, in order; composed they compute what :class:`GPT2` computes."""
    return [
        TiedLayerSpec("wte", TokenEmbedding, config),
        LayerSpec(PositionEmbedding, config),
        *(LayerSpec(Block, config, index) for index in range(config.n_layer)),
        LayerSpec(FinalNorm, config),
        TiedLayerSpec("wte", TokenEmbedding, config, forward_fn=tied_head),
    ]


def parameters_by_huggingface_name(module: nn.Module) -> dict[str, nn.Parameter]:
    """Canonical name -> parameter, for every part in ``module`` that has a ``huggingface_prefix``.

    ``module`` may be a :class:`GPT2`, one pipeline layer, or a container of layers such as DeepSpeed's
    ``PipelineModule``, of which each rank holds a part.
    """
    return {
        f"{part.huggingface_prefix}{local}": parameter
        for part in module.modules()
        if hasattr(part, "huggingface_prefix")
        for local, parameter in part.named_parameters()
    }


@torch.no_grad()
def load_initial_weights(module: nn.Module, config: transformers.GPT2Config, seed: int) -> None:
    """Fill ``module`` with GPT-2's published distribution, bit for bit the same in either form and on any partition.

    Each parameter is drawn in float32 on the CPU, from a generator of its own that its canonical name and the seed
    decide, whatever is drawn before or elsewhere.

    Source:
        ``GPT2PreTrainedModel._init_weights`` in transformers 5.
    """
    for name, parameter in parameters_by_huggingface_name(module).items():
        if name.endswith(".bias"):
            parameter.zero_()
        elif ".ln_" in name:
            parameter.fill_(1.0)
        else:
            std = config.initializer_range
            if name.endswith(".c_proj.weight"):
                # Two residual paths a block add up along the depth; this keeps their sum's variance at one block's.
                std /= math.sqrt(2 * config.n_layer)
            drawn = torch.empty(*parameter.shape, device="cpu")
            parameter.copy_(drawn.normal_(mean=0.0, std=std, generator=generator_of(seed, name)))
