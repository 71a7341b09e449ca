"""A strategy changes how a model is trained, and nothing of what it learns; checkpoints are of no strategy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from tests.harness.ranks import ROOT, Ranks, RanksOf
from tests.model_defs.tiny import (
    MODEL_CONFIG,
    SIZES,
    checkpoint,
    reported,
    saved_model,
    text_data,
    train,
)
from tests.model_defs.tiny import hyperparameters as of_causal_lm
from tests.package import records

LORA = {"lora": {"r": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}}
GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 64}
DRY = dict.fromkeys(("attn_pdrop", "embd_pdrop", "resid_pdrop"), 0.0)
FEW = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, **SIZES}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": MODEL_CONFIG,
    "a gpt2": {**GPT2, **DRY},  # hands no positions on
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2, **SIZES},
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
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "vit": ({"global_batch_size": 16, "weight_decay": 0.05}, {"validation_fraction": 0.02}),
    "drivable_vit": (
        {"global_batch_size": 8, "img_size": 16, "patch_size": 4, "embed_dim": 32, "num_heads": 2}
        | dict.fromkeys(("spatial_layers", "cross_view_layers", "temporal_layers"), 1),
        # 13 samples: more batches on one rank than on the other, and a last one that is not full.
        {"num_train_scenes": 32, "num_validation_scenes": 13, "num_views": 2},
    ),
    "gpt2": ({"global_batch_size": 4, "sequence_length": 16}, {"path": str(ROOT / "LICENSE")}),
    "dcgan": (
        {"global_batch_size": 64, "image_size": 8, "discriminator_learning_rate": 0.002}
        | dict.fromkeys(("latent_size", "generator_features", "discriminator_features"), 8),
        {},
    ),
}
DRAWING = ("vit", "dcgan")  # each rank draws crops or latents: two ranks are no one rank


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return text_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model to start from."""
    return saved_model(tmp_path_factory.mktemp("base"))


def hyperparameters(kind: str, stage: int, accumulation: int = 2, **more: Any) -> dict[str, Any]:
    if kind in OTHERS:
        # Small parameters would stay whole, and these are all small.
        split = {"stage3_param_persistence_threshold": 0} if stage == 3 else {}
        found = {
            "deepspeed_config": "experiments/deepspeed/zero1.json",
            "zero_stage": stage,
            "learning_rate": 0.002,
            "warmup_num_steps": 2,
            "overwrite_deepspeed_args": {"gradient_clipping": 0.1, "zero_optimization": split},
            **OTHERS[kind][0],
            **more,
        }
    else:
        model = {"model_config": CONFIGS[kind.partition(" with ")[0]]} if "model" not in more else {}
        found = of_causal_lm(stage, **model, **(LORA if "LoRA" in kind else {}), **more)
    found["overwrite_deepspeed_args"]["gradient_accumulation_steps"] = accumulation
    return found


SEQUENCE_2, SEQUENCE_4 = {"sequence_parallel_size": 2}, {"sequence_parallel_size": 4}
EXPERTS, RECOMPUTED = {"expert_parallel_size": 2}, {"activation_checkpointing": True}
LOADED = {"model": "base"}
ENGINES = ("generator_zero_stage", "discriminator_zero_stage")
LONG = pytest.mark.long("the same code paths as in a case that is short")
# Kind, ranks, ZeRO stage, accumulation, more hyperparameters.
Way = tuple[str, int, int, int, dict[str, Any]]
SHORT_WAYS: list[Way] = [
    ("vit", 2, 3, 1, RECOMPUTED),
    ("drivable_vit", 2, 2, 2, {}),
    ("drivable_vit", 2, 3, 1, RECOMPUTED),
    ("gpt2", 2, 3, 1, {"activation_checkpoint_interval": 3}),
    ("dcgan", 2, 0, 2, dict(zip(ENGINES, (1, 2), strict=True))),
    ("dcgan", 2, 0, 1, dict.fromkeys(ENGINES, 3)),
    ("llama", 2, 3, 2, SEQUENCE_2 | RECOMPUTED),
    ("llama with LoRA", 2, 3, 2, RECOMPUTED | LOADED),
    # Without a capacity, no token is dropped: nothing depends on which rank has which expert.
    ("mixtral", 2, 0, 2, EXPERTS),
    ("mixtral", 2, 3, 2, EXPERTS),
    ("mixtral", 4, 2, 1, EXPERTS),  # two groups, trained by the samples of all
]
LONG_WAYS: list[Way] = [
    ("gpt2", 2, 2, 1, {}),
    ("llama", 2, 1, 2, LOADED),
    ("llama", 4, 1, 1, SEQUENCE_4),  # half as many heads of keys as ranks
    ("llama with LoRA", 2, 2, 2, SEQUENCE_2),
    ("a gpt2", 2, 3, 2, SEQUENCE_2),
]
WAYS = [*SHORT_WAYS, *(pytest.param(*way, marks=LONG) for way in LONG_WAYS)]


def curves(run_dir: Path) -> dict[str, list[float]]:
    """Metric of training or of validation -> its values."""
    found: dict[str, list[float]] = {}
    for group in ("training", "validation"):
        for _, metrics in records(run_dir, group):
            for name in filter(re.compile("loss|norm|accuracy|iou|distance").search, metrics):
                found.setdefault(f"{group} {name}", []).append(metrics[name])
    return found


@pytest.fixture(scope="module")
def trained(
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
    data: dict[str, Any],
    base: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Callable[..., dict[str, list[float]]]:
    """``trained(kind, ranks, stage, accumulation, more)``: what four batches report; each training is made once."""
    known: dict[str, dict[str, list[float]]] = {}

    def of(kind: str, size: int, stage: int, accumulation: int, more: dict[str, Any]) -> Any:
        key = f"{kind, size, stage, accumulation, more}"
        if key not in known:
            run_dir, own = tmp_path_factory.mktemp("run"), OTHERS.get(kind, ({}, data))[1]
            more = {**more, "model": str(base), "model_config": None} if "model" in more else more
            model = kind if kind in OTHERS else "causal_lm"
            hparams = hyperparameters(kind, stage, accumulation, **more)
            ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}[size]
            ranks.run(train, run_dir, hparams, own, model=model)
            known[key] = curves(run_dir)
        return known[key]

    return of


@pytest.mark.parametrize(("kind", "size", "stage", "accumulation", "more"), WAYS)
def test_losses_metrics_and_norms_are_those_of_one_rank_without_zero(
    kind: str,
    size: int,
    stage: int,
    accumulation: int,
    more: dict[str, Any],
    trained: Callable[..., dict[str, list[float]]],
) -> None:
    """One that has the whole model and each batch at once."""
    found = trained(kind, size, stage, accumulation, more)
    start = {name: value for name, value in more.items() if name in LOADED}
    alone = 2 if kind in DRAWING else 1
    plain = trained(kind, alone, 0, 1, start)
    assert len(found["training loss"]) == 4
    # fp32 sums in another order differ by about 1e-6 of a loss.
    assert found == {name: pytest.approx(values, rel=1e-4) for name, values in plain.items()}


def layers_of(trial: Any) -> tuple[int, int]:
    """In each rank: how many blocks it has of a pipeline, and how many layers."""
    layers = [type(layer).__name__ for layer in trial.engine.module.forward_funcs]
    return layers.count("Block"), len(layers)


def test_a_pipeline_of_gpt2_trains_the_same_as_the_whole_however_it_is_cut(
    two_ranks: Ranks, tmp_path: Path, data: dict[str, Any]
) -> None:
    common = hyperparameters("gpt2", 0, pipe_parallel_size=2, learning_rate=0.01)
    common["deepspeed_config"] = "experiments/deepspeed/pipeline.json"
    del common["zero_stage"]
    two_ranks.run(train, tmp_path / "whole", {**common, "pipe_parallel_size": 1}, data, 2, model="gpt2")
    cuts: dict[str, dict[str, Any]] = {
        "blocks": {},
        "uniform": {"partition_method": "uniform", "activation_checkpointing": True},
        "parameters": {"partition_method": "parameters", "activation_checkpoint_interval": 2},
    }
    how = {"model": "gpt2 in a pipeline", "then": layers_of}
    for name, more in cuts.items():
        (blocks, layers), _ = two_ranks.run(train, tmp_path / name, {**common, **more}, data, 2, **how)
        assert blocks == 2 if name == "blocks" else layers == 4 or name == "parameters"
        assert reported(tmp_path / name) == pytest.approx(reported(tmp_path / "whole"), rel=1e-4), name


def test_sharing_experts_changes_no_losses_in_16_bits(
    two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """As many ranks, which share experts or have all of them; the balance of the experts is part of the loss."""
    balanced = {**CONFIGS["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
    for degree in (2, None):
        hparams = of_causal_lm(1, model_config=balanced, expert_parallel_size=degree)
        hparams["overwrite_deepspeed_args"]["bf16"] = {"enabled": True}
        two_ranks.run(train, tmp_path / str(degree), hparams, data)
    shared, apart = (curves(tmp_path / name) for name in ("2", "None"))
    assert shared == {name: pytest.approx(values, rel=1e-3) for name, values in apart.items()}
    losses, tokens, balances = (shared[f"training {name}loss"] for name in ("", "token_", "balance_"))
    assert losses == pytest.approx([a + 0.5 * b for a, b in zip(tokens, balances, strict=True)], rel=1e-2)


OWN_EXPERTS = {"expert_parallel_size": 1}
# Kind; of the first steps, and of the others: ranks, ZeRO stage, more hyperparameters.
Leg = tuple[int, int, dict[str, Any]]
CHANGES: list[tuple[str, Leg, Leg]] = [
    ("llama", (2, 3, SEQUENCE_2), (1, 1, {})),
    ("mixtral", (2, 1, EXPERTS), (1, 3, OWN_EXPERTS)),
    ("mixtral", (1, 3, OWN_EXPERTS), (2, 0, EXPERTS)),
]


@pytest.mark.parametrize(("kind", "first", "then"), CHANGES)
def test_a_checkpoint_is_of_no_layout(
    kind: str,
    first: Leg,
    then: Leg,
    ranks_of: RanksOf,
    data: dict[str, Any],
    trained: Callable[..., dict[str, list[float]]],
    tmp_path: Path,
) -> None:
    for (size, stage, more), batches in ((first, 2), (then, 4)):
        hparams = hyperparameters(kind, stage, **more)
        ranks_of(size).run(train, tmp_path, hparams, data, batches, resume=batches == 4)
    whole = trained(kind, 1, 0, 1, {})["training loss"]
    assert reported(tmp_path) == pytest.approx(whole, rel=1e-5)


# Of whole matrices; its momentum lies otherwise than the weights under ZeRO 1 and 2.
MUON = {"optimizer": {"type": "Muon"}, "gradient_clipping": 0.0, "scheduler": {"type": "WarmupLR"}}
# Kind of model, ZeRO stage, more hyperparameters and DeepSpeed settings, data.
RESUMED: dict[str, tuple[str, int, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    # Each engine under another stage, latents that are drawn, and a process that reads ahead.
    "dcgan": ("dcgan", 0, dict(zip(ENGINES, (2, 1), strict=True)), {}, {"num_workers": 1}),
    "experts": ("mixtral", 1, EXPERTS, {}, {}),
    "experts, Muon": ("mixtral", 1, EXPERTS, MUON, {}),
}


@pytest.mark.parametrize("name", RESUMED)
def test_a_run_goes_on_as_if_it_had_never_stopped(
    name: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    kind, stage, more, settings, own = RESUMED[name]
    hparams, model = hyperparameters(kind, stage, **more), "causal_lm" if kind == "mixtral" else kind
    hparams["overwrite_deepspeed_args"].update(settings)
    given = data if model == "causal_lm" else own
    two_ranks.run(train, tmp_path / "whole", hparams, given, 4, model=model, period=2)
    two_ranks.run(train, tmp_path / "parts", hparams, given, 2, model=model)
    two_ranks.run(train, tmp_path / "parts", hparams, given, 4, model=model, period=2, resume=True)
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")


def test_experts_load_in_plain_hugging_face(ranks_of: RanksOf, data: dict[str, Any], tmp_path: Path) -> None:
    """Under the names that transformers has."""
    models: list[Any] = []
    for size, more in ((2, EXPERTS), (1, {})):
        run_dir, hparams = tmp_path / str(size), hyperparameters("deepseek_v3", 1, **more)
        ranks_of(size).run(train, run_dir, hparams, data, 2)
        models.append(load_model_from_checkpoint_path(checkpoint(run_dir), context_dir=ROOT))
    models[0].save_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens_BT = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(plain(tokens_BT).logits, models[0](tokens_BT).logits)
        assert torch.allclose(plain(tokens_BT).logits, models[1](tokens_BT).logits, atol=1e-4)
