"""A transformer with GPT-2's shape, for measurements: random weights, random tokens. B samples, T tokens, C width."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from determined_ds.memory.model import ModelShape


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each behind a norm."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        samples, tokens, width = x_BTC.shape
        parts = self.attend(self.norm_1(x_BTC)).reshape(samples, tokens, 3, self.num_heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x_BTC = x_BTC + self.project(seen.transpose(1, 2).reshape(samples, tokens, width))
        return x_BTC + self.down(functional.gelu(self.up(self.norm_2(x_BTC)), approximate="tanh"))


class Decoder(nn.Module):
    """Predicts the next token; returns the loss.

    Args:
        shape: Its sizes; it has exactly as many parameters.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.hidden_size
        self.tokens = nn.Embedding(shape.vocab_size, width)
        self.positions = nn.Embedding(shape.sequence_length, width)
        self.blocks = nn.ModuleList(DecoderLayer(width, shape.num_heads) for _ in range(shape.num_layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens_BT: torch.Tensor) -> torch.Tensor:
        places_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTC = self.tokens(tokens_BT) + self.positions(places_T)
        for block in self.blocks:
            x_BTC = block(x_BTC)
        logits_BTV = functional.linear(self.norm(x_BTC), self.tokens.weight)
        return functional.cross_entropy(logits_BTV[:, :-1].flatten(0, 1).float(), tokens_BT[:, 1:].flatten())

    def random_tokens(self, samples: int, tokens: int | None = None) -> torch.Tensor:
        """A batch on the device of the weights."""
        shape = (samples, tokens or self.shape.sequence_length)
        return torch.randint(self.shape.vocab_size, shape, device=self.norm.weight.device)
