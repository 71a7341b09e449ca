"""A model computed in tiles holds what the estimate says."""

from __future__ import annotations

from dataclasses import replace

import pytest

from determined_ds.config.accelerator import assumed_cuda
from determined_ds.config.strategy import Strategy
from determined_ds.experiment.experiment import load_experiment
from determined_ds.memory import shape_from_sizes
from determined_ds.memory.activations import activation_bytes, head_bytes
from tests.making import resolved_of
from tests.memory.engines import pass_bytes
from tests.ranks import ROOT, Ranks

TOKENS, VOCAB_SIZE, SAMPLES = 512, 256, 4
SIZES = {"hidden_size": 32, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
TILES = [(8, 1), (1, 8), (4, 4)]  # of each MLP, of the loss


def real_activations(tiled_mlp: int, tiled_loss: int) -> int:
    """Bytes that a pass over a Llama holds at the peak; in fp32, in this rank."""
    import torch
    import transformers

    from model_defs.causal_lm.tiles import tile_loss, tile_mlps
    from model_defs.common.text import next_token_loss

    config = transformers.LlamaConfig(**SIZES, vocab_size=VOCAB_SIZE, max_position_embeddings=TOKENS)
    model = transformers.LlamaForCausalLM(config)
    tokens = torch.zeros(SAMPLES, TOKENS, dtype=torch.long)
    if tiled_mlp > 1:
        tile_mlps(model, tiled_mlp)
    if tiled_loss == 1:
        return pass_bytes(model, lambda: next_token_loss(model(tokens, use_cache=False).logits, tokens))
    tile_loss(model, tiled_loss)
    return pass_bytes(model, lambda: model(input_ids=tokens, use_cache=False, targets=tokens))


def estimated(tiled_mlp: int, tiled_loss: int) -> int:
    """Bytes of the same model's experiment."""
    from determined_ds.runtime.shapes.of_experiment import shape_of_experiment

    overrides = [f"model_config.{name}={value}" for name, value in SIZES.items()]
    overrides += [f"model_config.max_position_embeddings={TOKENS}", f"sequence_length={TOKENS}"]
    overrides += ["model_config.num_key_value_heads=4", "model_config.tie_word_embeddings=false"]
    overrides += ["overwrite_deepspeed_args.bf16.enabled=false", f"global_batch_size={2 * SAMPLES}"]
    overrides += [f"tiled_mlp={tiled_mlp}", f"tiled_loss={tiled_loss}"]
    path = ROOT / "experiments/causal_lm/const.yaml"
    experiment = load_experiment(path, [f"hyperparameters.{each}" for each in overrides])
    resolved = resolved_of(experiment, assumed_cuda(experiment.slots), context_dir=ROOT)
    assert (resolved.strategy.tiled_mlp, resolved.strategy.tiled_loss) == (tiled_mlp, tiled_loss)
    shape = shape_of_experiment(experiment, resolved, ROOT)
    assert shape.assumptions == ()
    return activation_bytes(shape, resolved.strategy)


@pytest.mark.parametrize(("tiled_mlp", "tiled_loss"), TILES)
def test_activations_are_those_of_a_real_pass(tiled_mlp: int, tiled_loss: int, one_rank: Ranks) -> None:
    (real,) = one_rank.run(real_activations, tiled_mlp, tiled_loss)
    assert estimated(tiled_mlp, tiled_loss) == pytest.approx(real, rel=0.10)


def test_by_the_formula_the_input_of_a_feed_forward_is_left_and_a_tile() -> None:
    shape = shape_from_sizes(
        num_layers=4, hidden_size=128, num_heads=4, vocab_size=50_000, sequence_length=TOKENS
    )
    whole = Strategy(micro_batch_size=SAMPLES)
    of_loss, of_mlp = replace(whole, tiled_loss=8), replace(whole, tiled_mlp=8)
    assert head_bytes(shape, of_loss) == head_bytes(shape, whole) // 8
    inside = SAMPLES * TOKENS * 128 * (8 * whole.element_bytes + 1)  # of one feed-forward
    saved = activation_bytes(shape, whole) - activation_bytes(shape, of_mlp)
    assert saved == 4 * inside - inside // 8
