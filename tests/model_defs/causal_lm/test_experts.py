"""A mixture of experts whose experts ranks share, by DeepSpeed's AutoEP: what is computed, what checkpoints hold."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml

from determined_ds import load_model_from_checkpoint_path
from determined_ds.errors import ConfigError, TrainingError
from tests.harness.ranks import ROOT, Ranks
from tests.memory.estimates import estimate
from tests.model_defs.causal_lm import tiny
from tests.model_defs.training import reported, train

STEPS = 20
OFFLOAD = {"device": "cpu"}
KINDS: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 24, "norm_topk_prob": True},
    # Experts that all tokens go to.
    "qwen2_moe": {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4,
        "v_head_dim": 8,
    },
}
# Of whole matrices; its momentum lies otherwise than the weights under ZeRO 1 and 2.
MUON = {"optimizer": {"type": "Muon"}, "gradient_clipping": 0.0, "scheduler": {"type": "WarmupLR"}}


def hyperparameters(stage: int, degree: int | None, kind: str = "mixtral", **more: Any) -> dict[str, Any]:
    config = {"model_type": kind, "num_experts_per_tok": 2, **tiny.SIZES, **KINDS[kind], **more}
    return tiny.hyperparameters(stage, model_config=config, expert_parallel_size=degree)


def losses(run_dir: Path) -> list[float]:
    return reported(run_dir) + reported(run_dir, "validation_loss", group="validation")


# (kind, ZeRO stage, ranks, ranks that share the experts)
WAYS = [("mixtral", 0, 2, 2), ("mixtral", 1, 2, 2), ("mixtral", 3, 2, 2), ("qwen3_moe", 2, 2, 2)]
WAYS += [("mixtral", 2, 4, 2), ("mixtral", 2, 4, 4)]  # two groups, trained by the samples of all; and one


@pytest.mark.parametrize(("kind", "stage", "size", "degree"), WAYS)
def test_losses_are_those_of_one_rank_that_has_all_experts(
    kind: str,
    stage: int,
    size: int,
    degree: int,
    one_rank: Ranks,
    two_ranks: Ranks,
    four_ranks: Ranks,
    data: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Without a capacity, no token is dropped: nothing depends on which rank has which expert."""
    hparams = hyperparameters(stage, degree, kind)
    if size == 4:
        hparams["overwrite_deepspeed_args"]["gradient_accumulation_steps"] = 1
    {2: two_ranks, 4: four_ranks}[size].run(tiny.train, tmp_path / "two", hparams, data, STEPS)
    one_rank.run(tiny.train, tmp_path / "one", hyperparameters(1, None, kind), data, STEPS)
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    norms = [reported(tmp_path / run, "grad_norm") for run in ("two", "one")]
    assert max(norms[1]) > 1.0, "clipping is to bite"
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


def test_their_balance_is_part_of_the_loss(two_ranks: Ranks, data: dict[str, Any], tmp_path: Path) -> None:
    """It is of the tokens of a micro-batch, so it is compared on as many ranks, which share experts or do not."""
    runs = {}
    for degree in (1, 2):
        hparams = hyperparameters(1, degree, output_router_logits=True, router_aux_loss_coef=0.5)
        two_ranks.run(tiny.train, tmp_path / str(degree), hparams, data, 6)
        names = ("loss", "token_loss", "balance_loss")
        runs[degree] = [reported(tmp_path / str(degree), name) for name in names]
    assert runs[2] == [pytest.approx(values, abs=1e-5) for values in runs[1]]
    for loss, token_loss, balance in zip(*runs[2], strict=True):
        assert loss == pytest.approx(token_loss + 0.5 * balance, rel=1e-5)
        assert balance >= 2.0 - 1e-3, "two experts a token, as evenly as can be"


ZERO = "zero_optimization"
PRECISIONS: dict[str, tuple[int, dict[str, Any], float]] = {
    "bf16, ZeRO 1": (1, {"bf16": {"enabled": True}}, 1e-3),
    "bf16, ZeRO 3": (3, {"bf16": {"enabled": True}}, 1e-3),
    "fp16, ZeRO 1": (1, {"fp16": {"enabled": True, "initial_scale_power": 8}}, 1e-3),
    "offloaded, ZeRO 3": (3, {ZERO: {"offload_optimizer": OFFLOAD, "offload_param": OFFLOAD}}, 1e-5),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_degree_changes_no_losses_in_16_bits_or_offloaded(
    name: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """As many ranks, which share experts or have all of them: losses, and norms over all experts."""
    stage, changes, tolerance = PRECISIONS[name]
    found = []
    for degree in (2, None):
        hparams, run_dir = hyperparameters(stage, degree), tmp_path / str(degree)
        ds = hparams["overwrite_deepspeed_args"]
        ds.update({**changes, ZERO: {**ds.get(ZERO, {}), **changes.get(ZERO, {})}})
        two_ranks.run(tiny.train, run_dir, hparams, data, 6)
        found.append((losses(run_dir), reported(run_dir, "grad_norm")))
    assert found[0][0] == pytest.approx(found[1][0], abs=tolerance)
    assert found[0][1] == pytest.approx(found[1][1], rel=5e-4)


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


CHANGES = [((1, 2), (3, 1)), ((3, 1), (0, 2)), ((1, 2), (1, None)), ((3, None), (1, 2))]


@pytest.mark.parametrize(("first", "then"), CHANGES)
def test_a_checkpoint_is_read_with_other_experts_on_each_rank(
    first: tuple[int, int | None],
    then: tuple[int, int | None],
    one_rank: Ranks,
    two_ranks: Ranks,
    data: dict[str, Any],
    tmp_path: Path,
) -> None:
    """(ZeRO stage, ranks that share the experts) of the first two steps, and of the others; None: by no AutoEP."""
    run_dir, ranks = tmp_path / "run", {None: one_rank, 1: one_rank, 2: two_ranks}
    ranks[first[1]].run(tiny.train, run_dir, hyperparameters(*first), data, 2)
    uuid = tiny.checkpoint(run_dir).name
    ranks[then[1]].run(tiny.train, run_dir, hyperparameters(*then), data, 5, uuid)
    one_rank.run(tiny.train, tmp_path / "whole", hyperparameters(1, None), data, 5)
    assert reported(run_dir) == pytest.approx(reported(tmp_path / "whole"), abs=1e-5)


@pytest.mark.parametrize("kind", ["mixtral", "qwen2_moe", "deepseek_v3"])
def test_what_was_trained_loads_in_plain_huggingface(
    kind: str, one_rank: Ranks, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """With experts that all tokens go to, and a router's bias, under the names that transformers has for them."""
    two_ranks.run(tiny.train, tmp_path / "two", hyperparameters(1, 2, kind), data, 3)
    one_rank.run(tiny.train, tmp_path / "one", hyperparameters(1, None, kind), data, 3)
    models: list[Any] = [
        load_model_from_checkpoint_path(tiny.checkpoint(tmp_path / run), context_dir=ROOT)
        for run in ("two", "one")
    ]
    models[0].save_pretrained(tmp_path / "saved")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokens_BT = torch.arange(64).reshape(2, 32)
    with torch.no_grad():
        assert torch.equal(plain(tokens_BT).logits, models[0](tokens_BT).logits)
        assert torch.allclose(plain(tokens_BT).logits, models[1](tokens_BT).logits, atol=1e-4)


def states_held(trial: Any) -> int:
    """In each rank: bytes of the parameters and of the optimizer's states; each storage counts once."""
    engine = trial.engine
    optimizer = getattr(engine.optimizer, "optimizer", None) or engine.optimizer
    tensors = [getattr(parameter, "ds_tensor", parameter.data) for parameter in engine.module.parameters()]
    tensors += [parameter for group in optimizer.param_groups for parameter in group["params"]]
    tensors += [value for state in optimizer.state.values() for value in state.values()]
    tensors += getattr(engine.optimizer, "fp32_partitioned_groups_flat", [])  # of ZeRO 3
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize("stage", [1, 3])
def test_what_ranks_hold_is_estimated(
    stage: int, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    """Experts by the degree, all else as without it."""
    hparams, config = hyperparameters(stage, 2), tmp_path / "moe.yaml"
    hparams["overwrite_deepspeed_args"]["bf16"] = {"enabled": False}
    template = yaml.safe_load((ROOT / "experiments/causal_lm/moe.yaml").read_text())
    ours = {**hparams, "fit": template["hyperparameters"]["fit"]}
    slots = {"resources": {"slots_per_trial": 2}}
    config.write_text(yaml.safe_dump({**template, **slots, "hyperparameters": ours, "data": data}))
    rows = estimate(config, ROOT)["strategies"]
    expected = {
        row["parameters_bytes"] + row["optimizer_states_bytes"]
        for row in rows
        if row["zero_stage"] == stage and row["expert_parallel_size"] == 2 and not row["offload_optimizer"]
    }
    held = two_ranks.run(train, tmp_path / "run", "causal_lm", hparams, data, 2, then=states_held)
    assert held == [pytest.approx(each, rel=0.1) for each in list(expected) * 2]


THREE = {"model_type": "mixtral", **tiny.SIZES, "num_local_experts": 3}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a model without experts": ({"model_config": tiny.MODEL_CONFIG}, "DeepSpeed finds no experts in it"),
    "three experts": ({"model_config": THREE}, "is not divisible by autoep_size=2"),
    "adapters": ({"lora": {"r": 4}}, "would replace its adapters by layers without them"),
    "an average": ({}, "average of experts that ranks share is not supported"),
}


def refused(run_dir: Path, hparams: dict[str, Any], data: dict[str, Any]) -> str:
    """In each rank: why a trial that averages its weights does not train."""
    from determined.pytorch import Batch

    from determined_ds import Trainer, open_context
    from determined_ds.callbacks import EMA
    from model_defs.causal_lm.trial import CausalLMTrial

    kind: Any = type("Trial", (CausalLMTrial,), {"build_callbacks": lambda trial: {"ema": EMA(0.9)}})
    with (
        open_context(hparams=hparams, exp_conf={"data": data}, run_dir=run_dir, accelerator="cpu") as context,
        pytest.raises((ConfigError, TrainingError)) as caught,
    ):
        Trainer(kind(context), context).fit(max_length=Batch(1), checkpoint_policy="none")
    return str(caught.value)


@pytest.mark.parametrize("what", REFUSED)
def test_what_would_mix_experts_is_refused(
    what: str, two_ranks: Ranks, data: dict[str, Any], tmp_path: Path
) -> None:
    more, message = REFUSED[what]
    for said in two_ranks.run(refused, tmp_path, {**hyperparameters(1, 2), **more}, data):
        assert message in said
