"""A model holds what the estimate says, computed in tiles or whole."""

from __future__ import annotations

import pytest

from tests.harness.ranks import ROOT, Ranks
from tests.memory.estimates import estimate, settings

TOKENS, VOCAB_SIZE, SAMPLES = 512, 256, 4
SIZES = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}


def real_activations(tiled_mlp: int, tiled_loss: int) -> int:
    """Bytes that a pass over a Llama holds at the peak, parameters and gradients aside; in fp32, in this rank."""
    import torch
    import transformers

    from model_defs.causal_lm.tiles import tile_loss, tile_mlps
    from model_defs.common.text import next_token_loss
    from tests.memory.piped import LiveBytes

    config = transformers.LlamaConfig(**SIZES, vocab_size=VOCAB_SIZE, max_position_embeddings=TOKENS)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    if tiled_mlp > 1:
        tile_mlps(model, tiled_mlp)
    if tiled_loss > 1:
        tile_loss(model, tiled_loss)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda each: setattr(each, "grad", None))
    with LiveBytes([*model.parameters(), *model.buffers()]) as live:
        if tiled_loss > 1:
            model(input_ids=tokens, use_cache=False, targets=tokens).backward()
        else:
            next_token_loss(model(tokens, use_cache=False).logits, tokens).backward()
    return live.peak_bytes


def estimated(tiled_mlp: int, tiled_loss: int) -> int:
    """Bytes of the same model's experiment."""
    own = {"max_position_embeddings": TOKENS, "num_key_value_heads": 4, "tie_word_embeddings": False}
    options = settings(
        **{f"model_config__{name}": value for name, value in {**SIZES, **own}.items()},
        sequence_length=TOKENS,
        overwrite_deepspeed_args__bf16__enabled=False,
        global_batch_size=2 * SAMPLES,
        tiled_mlp=tiled_mlp,
        tiled_loss=tiled_loss,
    )
    found = estimate(ROOT / "experiments/causal_lm/const.yaml", ROOT, *options)
    assert found["model"]["assumptions"] == []
    [held] = {row["activations_bytes"] for row in found["strategies"] if not row["activation_checkpointing"]}
    return int(held)


@pytest.mark.parametrize(("tiled_mlp", "tiled_loss"), [(1, 1), (8, 1), (1, 8), (4, 4)])
def test_activations_are_those_of_a_real_pass(tiled_mlp: int, tiled_loss: int, one_rank: Ranks) -> None:
    (real,) = one_rank.run(real_activations, tiled_mlp, tiled_loss)
    assert estimated(tiled_mlp, tiled_loss) == pytest.approx(real, rel=0.10)
