"""A strategy changes how a causal model is trained, and nothing of what it learns; checkpoints are of no strategy.

Ranks share samples, sequences or the experts of a mixture (DeepSpeed's AutoEP), under every ZeRO stage.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from determined_ds.errors import DeterminedDSError
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs.causal_lm import tiny
from tests.model_defs.training import reported, train

LORA = {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
DRY = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, **tiny.SIZES}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {**GPT2, **DRY},  # hands no positions on
    "qwen3": {"model_type": "qwen3", "head_dim": 8, **tiny.SIZES},
    "mistral": {"model_type": "mistral", "sliding_window": tiny.SEQUENCE_LENGTH, **tiny.SIZES},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **tiny.SIZES},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 4, "norm_topk_prob": True, **FEW},
    # With an expert that all tokens go to, and a router's bias.
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        **FEW,
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
KINDS: dict[str, dict[str, Any]] = {"llama": {}, "llama with LoRA": LORA}
KINDS |= {name: {"model_config": config} for name, config in CONFIGS.items()}
SEQUENCE_2, SEQUENCE_4 = {"sequence_parallel_size": 2}, {"sequence_parallel_size": 4}
EXPERTS, RECOMPUTED = {"expert_parallel_size": 2}, {"activation_checkpointing": True}
# Kind ("loaded": from a folder, not at random), ranks, ZeRO stage, more hyperparameters.
WAYS: list[tuple[str, int, int, dict[str, Any]]] = [
    *(("llama", 2, stage, {}) for stage in (0, 1, 2)),
    ("llama", 2, 3, RECOMPUTED),
    *(("llama loaded", 2, stage, {}) for stage in (1, 3)),
    *(("llama loaded with LoRA", 2, stage, RECOMPUTED) for stage in (1, 2, 3)),
    ("llama", 2, 3, SEQUENCE_2 | RECOMPUTED),
    ("llama", 4, 1, SEQUENCE_4),  # half as many heads of keys as ranks
    ("llama with LoRA", 2, 2, SEQUENCE_2),
    *((kind, 2, 3, SEQUENCE_2) for kind in ("gpt2", "qwen3")),
    ("mistral", 2, 0, SEQUENCE_2),
    # Without a capacity, no token is dropped: nothing depends on which rank has which expert.
    *(("mixtral", 2, stage, EXPERTS) for stage in (0, 1, 3)),
    ("qwen3_moe", 2, 2, EXPERTS),
    ("mixtral", 4, 2, EXPERTS),  # two groups, trained by the samples of all
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model to start from."""
    return tiny.saved_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def ranks(one_rank: Ranks, two_ranks: Ranks, four_ranks: Ranks) -> dict[int, Ranks]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks}


def hyperparameters(kind: str, stage: int, ranks: int = 2, /, **more: Any) -> dict[str, Any]:
    found = tiny.hyperparameters(stage, **KINDS[kind], **more)
    found["overwrite_deepspeed_args"]["gradient_accumulation_steps"] = 1 if ranks == 4 else 2
    return found


@pytest.fixture(scope="module")
def whole(
    ranks: dict[int, Ranks], data: dict[str, Any], base: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], list[float]]:
    """``whole(kind)``: what one rank reports that has all of it."""
    known: dict[str, list[float]] = {}

    def of(kind: str) -> list[float]:
        if kind not in known:
            run_dir = tmp_path_factory.mktemp("whole")
            ranks[1].run(train, run_dir, started(kind, 0, 1, base), data)
            known[kind] = tiny.curve(run_dir)
        return known[kind]

    return of


def started(kind: str, stage: int, ranks: int, base: Path, **more: Any) -> dict[str, Any]:
    """Hyperparameters of a kind that may be loaded."""
    hparams = hyperparameters(kind.replace(" loaded", ""), stage, ranks, **more)
    if "loaded" in kind:
        hparams = {**hparams, "model": str(base), "model_config": None}
    return hparams


@pytest.mark.parametrize(("kind", "size", "stage", "more"), WAYS)
def test_losses_and_norms_are_those_of_one_rank(
    kind: str,
    size: int,
    stage: int,
    more: dict[str, Any],
    ranks: dict[int, Ranks],
    data: dict[str, Any],
    whole: Callable[[str], list[float]],
    base: Path,
    tmp_path: Path,
) -> None:
    ranks[size].run(train, tmp_path, started(kind, stage, size, base, **more), data)
    found, expected = tiny.curve(tmp_path), whole(kind)
    assert (len(found), found[-1] < found[0]) == (17, True)
    # Relative. fp32 sums in another order differ by about 1e-6 of a loss.
    assert found == pytest.approx(expected, rel=1e-4)


# Kind; of the first steps, and of the others: ranks, ZeRO stage, more hyperparameters.
CHANGES: list[tuple[str, tuple[int, int, dict[str, Any]], tuple[int, int, dict[str, Any]]]] = [
    ("llama", (2, 3, SEQUENCE_2), (1, 1, {})),
    ("llama", (1, 0, {}), (2, 2, SEQUENCE_2)),
    ("llama", (4, 3, SEQUENCE_2), (2, 0, SEQUENCE_2)),
    ("mixtral", (2, 1, EXPERTS), (1, 3, {"expert_parallel_size": 1})),
    ("mixtral", (1, 3, {"expert_parallel_size": 1}), (2, 0, EXPERTS)),
    ("mixtral", (2, 1, EXPERTS), (1, 1, {})),  # by no AutoEP
    ("mixtral", (1, 3, {}), (2, 1, EXPERTS)),
]


@pytest.mark.parametrize(("kind", "first", "then"), CHANGES)
def test_a_checkpoint_is_of_no_layout(
    kind: str, first: Any, then: Any, ranks: dict[int, Ranks], data: dict[str, Any], tmp_path: Path
) -> None:
    ranks[1].run(train, tmp_path / "whole", hyperparameters(kind, 0), data, 6)
    latest = None
    for (size, stage, more), batches in ((first, 3), (then, 6)):
        hparams = hyperparameters(kind, stage, size, **more)
        ranks[size].run(train, tmp_path / "run", hparams, data, batches, latest)
        latest = latest or tiny.checkpoint(tmp_path / "run").name
    assert reported(tmp_path / "run") == pytest.approx(reported(tmp_path / "whole"), rel=1e-5)


def parameters_as_built(folder: str | None) -> dict[str, Any]:
    """In each rank: how a model is held before there is an engine."""
    import deepspeed

    from model_defs.causal_lm import config, model

    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found = config.read_config(folder, tiny.MODEL_CONFIG, vocab_size=256)
    ds_config = {"train_batch_size": 2, "zero_optimization": {"stage": 3}}
    built = model.build_model(found, folder, seed=1, dtype=torch.float32, zero3=ds_config)
    return {name: (p.numel(), p.ds_tensor.numel()) for name, p in built.named_parameters()}


@pytest.mark.parametrize("loaded", [False, True])
def test_under_zero_3_no_rank_holds_the_model(loaded: bool, two_ranks: Ranks, base: Path) -> None:
    whole = transformers.AutoModelForCausalLM.from_pretrained(base).num_parameters()
    for held in two_ranks.run(parameters_as_built, str(base) if loaded else None):
        assert {numel for numel, _ in held.values()} == {0}, "each is a placeholder"
        assert sum(share for _, share in held.values()) == pytest.approx(whole / 2, rel=0.01)


# --- experts that ranks share ---

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
    balanced = {**CONFIGS["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    for degree in (2, None):
        hparams = tiny.hyperparameters(stage, model_config=balanced, expert_parallel_size=degree)
        hparams["overwrite_deepspeed_args"].update(changes)
        two_ranks.run(train, tmp_path / str(degree), hparams, data, 6)
    assert tiny.curve(tmp_path / "2") == pytest.approx(tiny.curve(tmp_path / "None"), rel=1e-3)
    losses, of_tokens, balances = (
        reported(tmp_path / "2", name) for name in ("loss", "token_loss", "balance_loss")
    )
    assert losses == pytest.approx([a + 0.5 * b for a, b in zip(of_tokens, balances, strict=True)], rel=1e-2)
    assert min(balances) >= 1.9, "two experts a token, as evenly as can be"


# Of whole matrices; its momentum lies otherwise than the weights under ZeRO 1 and 2.
MUON = {"optimizer": {"type": "Muon"}, "gradient_clipping": 0.0, "scheduler": {"type": "WarmupLR"}}


@pytest.mark.parametrize("setting", ["1", "3", "muon-1", "muon-2"])
def test_a_run_goes_on_as_if_it_had_never_stopped(
    setting: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    hparams = hyperparameters("mixtral", int(setting[-1]), **EXPERTS)
    if "muon" in setting:
        hparams["overwrite_deepspeed_args"].update(MUON)
    for run, num_batches in (("straight", 5), ("stopped", 3)):
        two_ranks.run(train, tmp_path / run, hparams, data, num_batches)
    uuid = tiny.checkpoint(tmp_path / "stopped").name
    two_ranks.run(train, tmp_path / "stopped", hparams, data, 5, uuid)
    assert reported(tmp_path / "stopped") == reported(tmp_path / "straight")


@pytest.mark.parametrize("kind", ["mixtral", "deepseek_v3"])
def test_what_was_trained_loads_in_plain_huggingface(
    kind: str, ranks: dict[int, Ranks], data: dict[str, Any], tmp_path: Path
) -> None:
    """Under the names that transformers has."""
    models: list[Any] = []
    for size, more in ((2, EXPERTS), (1, {})):
        ranks[size].run(train, tmp_path / str(size), hyperparameters(kind, 1, **more), data, 3)
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
    "adapters": ({"lora": {"r": 4}}, "would replace its adapters by layers without them"),
    "an average": ({"averaged": True}, "average of experts that ranks share is not supported"),
}


def refused(run_dir: Path, hparams: dict[str, Any], data: dict[str, Any]) -> str:
    """In each rank: why a trial does not train."""
    from determined_ds.callbacks import EMA
    from model_defs.causal_lm.trial import CausalLMTrial

    callbacks = {"ema": EMA(0.9)} if hparams.pop("averaged", False) else {}
    with (
        mock.patch.object(CausalLMTrial, "build_callbacks", return_value=callbacks),
        pytest.raises(DeterminedDSError) as caught,
    ):
        train(run_dir, hparams, data, 1)
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_mix_experts_is_refused(
    what: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    more, message = REFUSED[what]
    for said in two_ranks.run(refused, tmp_path, {**hyperparameters("mixtral", 1, **EXPERTS), **more}, data):
        assert message in said
