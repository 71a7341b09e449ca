"""A mixture of experts whose experts ranks share, by DeepSpeed's AutoEP: what is computed, what checkpoints hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.causal_lm import tiny
from tests.model_defs.training import reported

SMALL = {"num_experts": 4, "moe_intermediate_size": 24}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {**SMALL, "norm_topk_prob": True},
    # With an expert that all tokens go to, and a router's bias.
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "v_head_dim": 8,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
    },
}
# Of whole matrices; its momentum lies otherwise than the weights under ZeRO 1 and 2.
MUON = {"optimizer": {"type": "Muon"}, "gradient_clipping": 0.0, "scheduler": {"type": "WarmupLR"}}


def hyperparameters(stage: int, degree: int | None, kind: str = "mixtral", **more: Any) -> dict[str, Any]:
    config = {"model_type": kind, "num_experts_per_tok": 2, **tiny.SIZES, **KINDS[kind], **more}
    return tiny.hyperparameters(stage, model_config=config, expert_parallel_size=degree)


@pytest.fixture
def ranks(one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


# (kind, ZeRO stage, ranks, ranks that share the experts); of four ranks two groups, trained by the samples of all
WAYS = [
    ("mixtral", 0, 2, 2),
    ("mixtral", 1, 2, 2),
    ("mixtral", 3, 2, 2),
    ("qwen3_moe", 2, 2, 2),
    ("mixtral", 2, 4, 2),
]


@pytest.mark.parametrize(("kind", "stage", "size", "degree"), WAYS)
def test_losses_are_those_of_one_rank_that_has_all_experts(
    kind: str,
    stage: int,
    size: int,
    degree: int,
    ranks: dict[int, Ranks],
    data: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Without a capacity, no token is dropped: nothing depends on which rank has which expert."""
    hparams = hyperparameters(stage, degree, kind)
    hparams["overwrite_deepspeed_args"]["gradient_accumulation_steps"] = 4 // size
    ranks[size].run(tiny.train, tmp_path / "shared", hparams, data, 20)
    ranks[1].run(tiny.train, tmp_path / "one", hyperparameters(1, None, kind), data, 20)
    assert tiny.curve(tmp_path / "shared") == pytest.approx(tiny.curve(tmp_path / "one"), rel=1e-4)
    assert max(reported(tmp_path / "one", "grad_norm")) > 1.0, "clipping is to bite"


OFFLOADS = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
PRECISIONS: dict[str, tuple[int, dict[str, Any]]] = {
    "bf16, ZeRO 1": (1, {"bf16": {"enabled": True}}),
    "bf16, ZeRO 3": (3, {"bf16": {"enabled": True}}),
    "fp16, ZeRO 1": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}),
    "offloaded, ZeRO 3": (3, {"zero_optimization": OFFLOADS}),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_sharing_changes_no_losses_in_16_bits_or_offloaded(
    name: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """As many ranks, which share experts or have all of them; the balance of the experts is part of the loss."""
    stage, changes = PRECISIONS[name]
    for run, degree in (("shared", 2), ("all", None)):
        hparams = hyperparameters(stage, degree, output_router_logits=True, router_aux_loss_coef=0.5)
        hparams["overwrite_deepspeed_args"].update(changes)
        two_ranks.run(tiny.train, tmp_path / run, hparams, data, 6)
    assert tiny.curve(tmp_path / "shared") == pytest.approx(tiny.curve(tmp_path / "all"), rel=1e-3)
    losses, of_tokens, balances = (
        reported(tmp_path / "shared", name) for name in ("loss", "token_loss", "balance_loss")
    )
    assert losses == pytest.approx([a + 0.5 * b for a, b in zip(of_tokens, balances, strict=True)], rel=1e-2)
    assert min(balances) >= 1.9, "two experts a token, as evenly as can be"


@pytest.mark.parametrize("setting", ["1", "3", "muon-1", "muon-2"])
def test_a_run_goes_on_as_if_it_had_never_stopped(
    setting: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    hparams = hyperparameters(int(setting[-1]), 2)
    if "muon" in setting:
        hparams["overwrite_deepspeed_args"].update(MUON)
    for run, num_batches in (("straight", 5), ("stopped", 3)):
        two_ranks.run(tiny.train, tmp_path / run, hparams, data, num_batches)
    uuid = tiny.checkpoint(tmp_path / "stopped").name
    two_ranks.run(tiny.train, tmp_path / "stopped", hparams, data, 5, uuid)
    assert reported(tmp_path / "stopped") == reported(tmp_path / "straight")


# (ZeRO stage, ranks that share the experts) of the first two steps, and of the others; None: by no AutoEP.
CHANGES = [((1, 2), (3, 1)), ((3, 1), (0, 2)), ((1, 2), (1, None)), ((3, None), (1, 2))]


@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_checkpoint_is_read_with_other_experts_on_each_rank(
    first: tuple[int, int | None],
    then: tuple[int, int | None],
    ranks: dict[int, Ranks],
    data: dict[str, Any],
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    ranks[first[1] or 1].run(tiny.train, run_dir, hyperparameters(*first), data, 2)
    uuid = tiny.checkpoint(run_dir).name
    ranks[then[1] or 1].run(tiny.train, run_dir, hyperparameters(*then), data, 5, uuid)
    ranks[1].run(tiny.train, tmp_path / "whole", hyperparameters(1, None), data, 5)
    assert reported(run_dir) == pytest.approx(reported(tmp_path / "whole"), abs=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_what_was_trained_loads_in_plain_huggingface(
    kind: str, ranks: dict[int, Ranks], data: dict[str, Any], tmp_path: Path
) -> None:
    """Under the names that transformers has."""
    models: list[Any] = []
    for size, degree in ((2, 2), (1, None)):
        ranks[size].run(tiny.train, tmp_path / str(size), hyperparameters(1, degree, kind), data, 3)
        checkpoint = tiny.checkpoint(tmp_path / str(size))
        models.append(load_model_from_checkpoint_path(checkpoint, context_dir=ROOT))
    models[0].save_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens_BT = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(plain(tokens_BT).logits, models[0](tokens_BT).logits)
        assert torch.allclose(plain(tokens_BT).logits, models[1](tokens_BT).logits, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a model without experts": ({"model_config": tiny.MODEL_CONFIG}, "DeepSpeed finds no experts in it"),
    "three experts": (hyperparameters(1, 2, num_local_experts=3), "is not divisible by autoep_size=2"),
    "adapters": ({"lora": {"r": 4}}, "would replace its adapters by layers without them"),
    "an average": ({"averaged": True}, "average of experts that ranks share is not supported"),
}


def refused(run_dir: Path, hparams: dict[str, Any], data: dict[str, Any]) -> str:
    """In each rank: why a trial does not train."""
    from determined_ds.callbacks import EMA
    from determined_ds.errors import DeterminedDSError
    from model_defs.causal_lm.trial import CausalLMTrial

    callbacks = {"ema": EMA(0.9)} if hparams.pop("averaged", False) else {}
    with (
        mock.patch.object(CausalLMTrial, "build_callbacks", return_value=callbacks),
        pytest.raises(DeterminedDSError) as caught,
    ):
        tiny.train(run_dir, hparams, data, 1)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_mix_experts_is_refused(
    what: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    more, message = REFUSED[what]
    for said in two_ranks.run(refused, tmp_path, {**hyperparameters(1, 2), **more}, data):
        assert message in said
