"""DeepSpeed's Muon: the same training under every ZeRO stage, as long as nothing is clipped; resumed under any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints.strategies import run
from tests.harness.ranks import Ranks, RanksFailed
from tests.package import tensors
from tests.trial.regression import trial_class

PARAMS = {"lr": 0.02, "adam_lr": 0.001, "momentum": 0.95, "weight_decay": 0.01, "torch_adam": True}
MUON = {"type": "Muon", "params": PARAMS}
LAYOUTS = [{"zero": {"stage": stage}} for stage in range(3)]
LAYOUTS += [{"zero": {"stage": 3, "reduce_scatter": False}}]


def of_muon(clipping: float = 0.0) -> dict[str, Any]:
    return {"overwrite_deepspeed_args": {"optimizer": MUON, "scheduler": None, "gradient_clipping": clipping}}


def test_the_same_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    """Clipping scales a gradient, which Muon does not look at; of Adam's part little is left to see."""
    expected, *others = (two_ranks.run(run, each, tmp_path, steps=6, **of_muon()) for each in LAYOUTS)
    clipped = two_ranks.run(run, LAYOUTS[0], tmp_path, steps=6, **of_muon(1.0))
    for found in others:
        assert found == [pytest.approx(expected[0], rel=1e-5)] * 2
    assert clipped == [pytest.approx(expected[0], rel=1e-3)] * 2


def held_in(checkpoint: Path) -> dict[tuple[str, str], torch.Tensor]:
    """A checkpoint's tensors; the weights by one name, whether it has copies of them or not."""
    found = dict[tuple[str, str], torch.Tensor]()
    for (name, state), each in sorted(tensors(checkpoint).items(), key=lambda item: item[0][1] != "fp32"):
        found.setdefault((name, "weight" if state == "fp32" else state), each.float())
    return found


def test_one_rank_without_zero_continues_with_what_two_under_zero_3_wrote(
    two_ranks: Ranks, one_rank: Ranks, tmp_path: Path
) -> None:
    """Weights, momenta and Adam's states are the same, bit for bit, and so are the steps to rounding."""
    saved, again, more = tmp_path / "a", tmp_path / "b", of_muon()
    (whole, _) = two_ranks.run(run, LAYOUTS[3], tmp_path, steps=5, **more)
    two_ranks.run(run, LAYOUTS[3], tmp_path, write=saved, steps=3, **more)
    [rest] = one_rank.run(run, LAYOUTS[0], tmp_path, read=saved, first=3, steps=2, **more)
    assert rest == pytest.approx(whole[3:], rel=1e-6)
    one_rank.run(run, LAYOUTS[0], tmp_path, read=saved, write=again, **more)
    was, now = held_in(saved), held_in(again)
    assert was.keys() == now.keys()
    assert any(state == "momentum_buffer" for _, state in was)
    assert all(torch.equal(was[key], now[key]) for key in was)
    # Under ZeRO 1 and 2 Muon keeps the momentum of whole matrices.
    with pytest.raises(RanksFailed, match="only the ranks and the strategy that wrote them"):
        one_rank.run(run, LAYOUTS[2], tmp_path, read=saved, **more)


def left_to_adam(run_dir: Path, kind: str) -> set[str]:
    """In a rank: the names of the matrices that Adam steps."""
    from determined_ds import open_context

    if kind:
        sizes = {"num_hidden_layers": 1, "num_attention_heads": 2, "hidden_size": 8, "intermediate_size": 8}
        config = transformers.AutoConfig.for_model(kind, vocab_size=11, **sizes)
        model: Any = transformers.AutoModelForCausalLM.from_config(config)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        model[1].weight.use_muon = False
    hparams = {"global_batch_size": 8, "deepspeed_config": {"optimizer": MUON}}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        engine = trial_class(build_model=lambda self: model)(context).engine
    named = engine.module.named_parameters()
    return {name for name, each in named if not each.use_muon and each.ndim > 1}


def test_embeddings_heads_and_what_a_model_names_are_left_to_adam(one_rank: Ranks, tmp_path: Path) -> None:
    llama = {"model.embed_tokens.weight", "lm_head.weight"}
    assert one_rank.run(left_to_adam, tmp_path, "llama") == [llama]
    assert one_rank.run(left_to_adam, tmp_path, "") == [{"1.weight"}]
