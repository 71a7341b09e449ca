"""GPT-2 in two forms over the same weights: one model, or a list of layers for a pipeline.

Both forms run the same ``transformers`` blocks in the same order, and every parameter has one canonical name,
the one that Hugging Face gives it. Initial weights and checkpoints go by that name, so a run does not depend
on how the model is cut.

Legend of shape suffixes: B batch, T tokens of a sequence, V vocabulary, C embedding width.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import transformers
from deepspeed.pipe import LayerSpec, TiedLayerSpec
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from transformers.models.gpt2.modeling_gpt2 import GPT2Block

from model_defs.common.parameters import generator_of
from model_defs.common.sections import Section, config_error, parse_section

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
    """True: an interval of 1."""
    activation_checkpoint_interval: int | None = Field(None, ge=0)
    """Blocks of which only the input is kept, to be computed again together in the backward pass; 0: none."""

    def interval(self) -> int:
        """Of checkpoints of activations.

        Raises:
            ConfigError: The two hyperparameters contradict each other.
        """
        switch, interval = self.activation_checkpointing, self.activation_checkpoint_interval
        if interval is None:
            return int(switch or False)
        if switch not in (None, bool(interval)):
            message = f"contradicts activation_checkpointing: {str(switch).lower()}."
            fix = "leave out activation_checkpointing: the interval is enough"
            raise config_error("hyperparameters.activation_checkpoint_interval", interval, message, fix)
        return interval

    def vocabulary(self, num_tokens: int) -> int:
        """V, of a tokenizer of so many tokens.

        Raises:
            ConfigError: ``vocab_size`` is less.
        """
        if self.vocab_size is not None and self.vocab_size < num_tokens:
            message = f"must be at least {num_tokens}, the tokens of the tokenizer."
            fix = f"vocab_size: {num_tokens} or more; or leave it out"
            raise config_error("hyperparameters.vocab_size", self.vocab_size, message, fix)
        return self.vocab_size or num_tokens


def gpt2_config(
    model_size: str = "tiny", *, vocab_size: int, attention: str = "sdpa", **options: Any
) -> transformers.GPT2Config:
    """The configuration of a GPT-2 of a named size.

    Args:
        model_size: One of :data:`MODEL_SIZES`.
        vocab_size: V, at least 1.
        attention: The attention kernel, by transformers' name.
        options: ``sequence_length`` and ``dropout``, as in :class:`Options`.

    Raises:
        ConfigError: Everything that is wrong with the options.
    """
    given = {"model_size": model_size, **options}
    chosen = parse_section(Options, given, section="hyperparameters")
    dropout, positions = chosen.dropout, chosen.sequence_length
    # Ids that lie outside the vocabulary would be saved with the model and mislead its users.
    end_of_text = vocab_size - 1 if vocab_size == PUBLISHED_VOCAB_SIZE else None
    return transformers.GPT2Config(
        **MODEL_SIZES[model_size],
        vocab_size=vocab_size,
        n_positions=positions if model_size == "tiny" else max(positions, PUBLISHED_POSITIONS),
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        resid_pdrop=dropout,
        bos_token_id=end_of_text,
        eos_token_id=end_of_text,
        use_cache=False,
        attn_implementation=attention,
    )


class HuggingFaceNamed:
    """A module that knows the canonical names of its parameters: a prefix, then their local names."""

    huggingface_prefix: str = ""

    def huggingface_names(self) -> dict[str, str]:
        """Local parameter name -> name in the ``state_dict`` of ``transformers.GPT2LMHeadModel``."""
        assert isinstance(self, nn.Module)
        return {local: self.huggingface_prefix + local for local, _ in self.named_parameters()}


class GPT2(HuggingFaceNamed, transformers.GPT2LMHeadModel):
    """The whole model, for data parallel training. Its ``state_dict`` is Hugging Face's own, head tied.

    Attributes:
        activation_checkpoint_interval: In training, of so many blocks only the input is kept, and they are
            computed again together in the backward pass; 0: everything is kept.
    """

    activation_checkpoint_interval = 0

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


class TokenEmbedding(HuggingFaceNamed, nn.Embedding):
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


class PositionEmbedding(HuggingFaceNamed, nn.Module):
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


class Block(HuggingFaceNamed, GPT2Block):
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


class FinalNorm(HuggingFaceNamed, nn.LayerNorm):
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
    """Canonical name -> parameter, for every named part found in ``module``.

    ``module`` may be a :class:`GPT2`, one pipeline layer, or a container of layers such as DeepSpeed's
    ``PipelineModule``, of which each rank holds a part.
    """
    found: dict[str, nn.Parameter] = {}
    for part in module.modules():
        if isinstance(part, HuggingFaceNamed):
            local = dict(part.named_parameters())
            found.update({name: local[own] for own, name in part.huggingface_names().items()})
    assert found, f"no part of GPT-2 in a {type(module).__name__}"
    return found


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
