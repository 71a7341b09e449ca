"""Ranks that share every layer by DeepSpeed's AutoTP compute what plain PyTorch does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.harness.ranks import Ranks, RanksFailed, RanksOf
from tests.package import records
from tests.trial import regression

STEPS, BATCH, TOKENS, VOCABULARY, CLIPPING, RATE = 20, 8, 16, 64, 0.5, 0.003
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "max_position_embeddings": 32}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
THREE_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}
DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2 = {"n_embd": 32, "n_head": 4, "n_layer": 2, **dict.fromkeys(DROPOUT, 0.0)}
# Of each kind its sizes; gpt_bigcode is GPT-2 by nn.Linear, of which DeepSpeed does not know the layers to cut.
KINDS = {"llama": SIZES, "gpt2": GPT2, "gpt_bigcode": {"multi_query": False, **GPT2}}
BIGCODE_CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [".*[.](c_attn|c_fc)[.]weight$"], "partition_type": "column"},
        {"patterns": [".*[.]c_proj[.]weight$"], "partition_type": "row"},
    ],
}
NOTHING_CUT = {"use_default_specs": False, "layer_specs": [{"patterns": ["nothing"]}]}


def model_of(kind: str, more: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(
        kind, **{"vocab_size": VOCABULARY, **KINDS[kind], **SPECIAL, **more}
    )
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(config).float()


def samples(count: int = 2 * BATCH) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Sequences that a model can learn: each token is the one before it, and 7 more."""
    starts = torch.randint(VOCABULARY, (count, 1), generator=torch.Generator().manual_seed(1))
    tokens = (starts + 7 * torch.arange(TOKENS + 1)) % VOCABULARY
    return [(each[:-1], each[1:]) for each in tokens]


def loss_of(model: Any, batch: Any) -> torch.Tensor:
    logits = model(input_ids=batch[0], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


def trial_class(kind: str, more: dict[str, Any]) -> Any:
    return regression.trial_class(
        build_model=lambda self: model_of(kind, more),
        loss=lambda self, model, batch: loss_of(model, batch),
        build_training_data_loader=lambda self: self.training_loader(samples(), shuffle=False),
        build_validation_data_loader=lambda self: self.validation_loader(samples(5)),
    )


def hyperparameters(kind: str, stage: int, **given: Any) -> dict[str, Any]:
    cut = {"partition_config": BIGCODE_CUT} if kind == "gpt_bigcode" else {}
    ds_config = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
        "gradient_clipping": CLIPPING,
        "tensor_parallel": cut,
    }
    return {"global_batch_size": BATCH, "model_parallel_size": 2, "deepspeed_config": ds_config, **given}


def run(run_dir: Path, kind: str, more: dict[str, Any], hparams: dict[str, Any]) -> dict[str, Any]:
    """Train in this rank; what it holds at the end."""
    trial = regression.train(run_dir, trial_class(kind, more), hparams, steps=STEPS, checkpoint_policy="none")
    return {
        "shapes": {name: tuple(each.shape) for name, each in trial.engine.module.named_parameters()},
        "replica": trial.context._mpu.data_parallel_rank,
        "batch_size": trial.engine.train_batch_size(),
    }


def plain(kind: str, more: dict[str, Any]) -> tuple[list[float], list[float], float]:
    """Losses and norms of gradients of PyTorch alone, and the loss of the validation."""
    model = model_of(kind, more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    losses, norms, data = [], [], samples()
    for step in range(STEPS):
        at = step % 2 * BATCH
        loss = loss_of(model, [torch.stack(part) for part in zip(*data[at : at + BATCH], strict=True)])
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        batch = [torch.stack(part) for part in zip(*samples(5), strict=True)]
        return losses, norms, loss_of(model, batch).item()


# Kind, ZeRO stage, ranks; of the model; of the hyperparameters.
CASES: dict[str, tuple[str, int, int, dict[str, Any], dict[str, Any]]] = {
    **{f"llama, ZeRO {stage}": ("llama", stage, 2, {}, {}) for stage in range(4)},
    **{f"llama, ZeRO {stage}, two replicas": ("llama", stage, 4, {}, {}) for stage in (1, 3)},
    "llama, tied": ("llama", 1, 2, {"tie_word_embeddings": True}, {}),
    "llama, 3 heads of keys": ("llama", 1, 2, THREE_HEADS, {}),
    "llama, accumulation": ("llama", 2, 2, {}, {"micro_batch_size": 2}),
    "GPT-2 by nn.Linear": ("gpt_bigcode", 1, 2, {}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_pytorch(name: str, ranks_of: RanksOf, tmp_path: Path) -> None:
    """``model_parallel_size`` alone asks for it, and each rank holds half of every layer."""
    kind, stage, size, more, given = CASES[name]
    hparams = hyperparameters(kind, stage, **given)
    ranks = ranks_of(size).run(run, tmp_path, kind, more, hparams)
    losses, norms, validation = plain(kind, more)
    assert max(norms) > CLIPPING
    training, [validated] = ([m for _, m in records(tmp_path, group)] for group in ("training", "validation"))
    assert [metrics["loss"] for metrics in training] == pytest.approx(losses, abs=1e-5)
    assert [metrics["grad_norm"] for metrics in training] == pytest.approx(norms, rel=1e-4)
    assert validated["validation_loss"] == pytest.approx(validation, abs=1e-5)
    assert [(rank["replica"], rank["batch_size"]) for rank in ranks] == [(n // 2, BATCH) for n in range(size)]
    if name == "llama, ZeRO 1":
        shapes, parts = ranks[1]["shapes"], ("q_proj", "o_proj")
        found = [shapes[f"model.layers.0.self_attn.{part}.weight"] for part in parts]
        assert found == [(16, 32), (32, 16)]
    assert json.loads((tmp_path / "deepspeed_config.json").read_text())["tensor_parallel"]["autotp_size"] == 2


def dropped(run_dir: Path, hparams: dict[str, Any]) -> list[float]:
    """In each rank, some of what the model returns in training mode after a step: equal where its dropout is."""
    kind = trial_class("gpt_bigcode", dict.fromkeys(DROPOUT, 0.3))
    trial = regression.train(run_dir, kind, hparams, steps=2)
    trial.engine.train()
    with torch.no_grad():
        tokens = torch.stack([each for each, _ in samples(4)])
        return list(trial.engine(input_ids=tokens, use_cache=False).logits.flatten()[::97].tolist())


def test_ranks_draw_the_same_dropout_for_what_they_share(two_ranks: Ranks, tmp_path: Path) -> None:
    """Without it their residual streams would be different ones, and no error would say so."""
    first, second = two_ranks.run(dropped, tmp_path, hyperparameters("gpt_bigcode", 1))
    assert first == second


@pytest.mark.parametrize(
    ("kind", "more", "cut", "message"),
    [
        ("gpt2", {}, {}, "its matrices are Conv1D, which hold the transposed weights"),
        ("llama", {**THREE_HEADS, "attention_dropout": 0.1}, {}, "the ranks would draw different dropout"),
        ("llama", {}, {"partition_config": NOTHING_CUT}, "none of its layers was cut"),
    ],
)
def test_a_model_that_would_be_cut_wrongly_is_refused(
    kind: str, more: dict[str, Any], cut: dict[str, Any], message: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    hparams = hyperparameters(kind, 1, overwrite_deepspeed_args={"tensor_parallel": cut})
    with pytest.raises(RanksFailed, match=f"(?s)hyperparameters.model_parallel_size = 2.*{message}"):
        two_ranks.run(run, tmp_path, kind, more, hparams)
