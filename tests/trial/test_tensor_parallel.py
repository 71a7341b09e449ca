"""Tensor parallel by DeepSpeed's AutoTP: ranks that share every layer compute what one process does.

Tiny models of transformers' own classes, in fp32, with clipping that bites; 20 steps beside plain PyTorch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds.errors import ConfigError
from tests.harness.ranks import Ranks
from tests.package import records
from tests.trial.regression import train

STEPS, BATCH, TOKENS, VOCABULARY, CLIPPING, RATE = 20, 8, 16, 64, 0.5, 0.003
SPECIAL = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
# GPT-2 by nn.Linear; DeepSpeed does not know which of its layers to cut.
BIGCODE = {"multi_query": False, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 32}
BIGCODE |= {f"{kind}_pdrop": 0.0 for kind in ("embd", "attn", "resid")}
BIGCODE_CUT = {
    "use_default_specs": False,
    "layer_specs": [
        {"patterns": [".*[.](c_attn|c_fc)[.]weight$"], "partition_type": "column"},
        {"patterns": [".*[.]c_proj[.]weight$"], "partition_type": "row"},
    ],
}
NOTHING_CUT = {"use_default_specs": False, "layer_specs": [{"patterns": ["nothing"]}]}
THREE_HEADS = {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 3}


def model_of(kind: str, **more: Any) -> Any:
    if kind == "gpt_bigcode":
        config: Any = transformers.GPTBigCodeConfig(vocab_size=VOCABULARY, **{**BIGCODE, **SPECIAL, **more})
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_head=4, n_layer=2, **SPECIAL)
    else:
        classes = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}
        config = classes[kind](**{**SIZES, **SPECIAL, **more})
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


def trial_class() -> Any:
    from determined import pytorch

    from determined_ds import DataParallelTrial

    class Count(pytorch.MetricReducer):
        """Samples that were validated."""

        def reset(self) -> None:
            self.count = 0

        def per_slot_reduce(self) -> int:
            return self.count

        def cross_slot_reduce(self, per_slot_metrics: list[int]) -> dict[str, int]:
            return {"validated": sum(per_slot_metrics)}

    class Trial(DataParallelTrial):
        def prepare(self) -> None:
            self.counted = self.context.wrap_reducer(Count(), for_training=False)

        def build_model(self) -> torch.nn.Module:
            hparams = self.context.get_hparams()
            return model_of(hparams["kind"], **hparams["more"])

        def loss(self, model: Any, batch: Any) -> torch.Tensor:
            return loss_of(model, batch)

        def evaluate(self, model: Any, batch: Any) -> dict[str, Any]:
            self.counted.count += len(batch[0])
            return super().evaluate(model, batch)

        def build_training_data_loader(self) -> Any:
            return self.training_loader(samples(), shuffle=False)

        def build_validation_data_loader(self) -> Any:
            return self.validation_loader(samples(5))

    return Trial


def hyperparameters(
    kind: str, stage: int, more: Any = None, ds_config: Any = None, **given: Any
) -> dict[str, Any]:
    own = {
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": RATE, "weight_decay": 0.01}},
        "gradient_clipping": CLIPPING,
        **({"tensor_parallel": {"partition_config": BIGCODE_CUT}} if kind == "gpt_bigcode" else {}),
        **(ds_config or {}),
    }
    sizes = {"global_batch_size": BATCH, "model_parallel_size": 2}
    return {**sizes, "deepspeed_config": own, "kind": kind, "more": more or {}, **given}


def run(run_dir: Path, hparams: dict[str, Any]) -> dict[str, Any]:
    """Train in this rank; what it holds at the end."""
    from determined.pytorch import Batch

    fit = {"validation_period": Batch(STEPS), "checkpoint_policy": "none"}
    trial = train(run_dir, trial_class(), hparams, steps=STEPS, **fit)
    return {
        "shapes": {name: tuple(each.shape) for name, each in trial.engine.module.named_parameters()},
        "replica": trial.context._mpu.data_parallel_rank,
        "batch_size": trial.engine.train_batch_size(),
    }


def plain(kind: str, **more: Any) -> tuple[list[float], list[float], float]:
    """Losses and norms of gradients of PyTorch alone, and the loss of the validation."""
    model = model_of(kind, **more)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    losses, norms, data = [], [], samples()
    for step in range(STEPS):
        at = step % 2 * BATCH
        batch = [torch.stack(part) for part in zip(*data[at : at + BATCH], strict=True)]
        loss = loss_of(model, batch)
        optimizer.zero_grad()
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)))
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        batch = [torch.stack(part) for part in zip(*samples(5), strict=True)]
        return losses, norms, loss_of(model, batch).item()


def reported(run_dir: Path, group: str, name: str) -> list[float]:
    return [metrics[name] for _, metrics in records(run_dir, group)]


CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    **{f"llama, ZeRO {stage}": ("llama", stage, {}) for stage in range(4)},
    "llama, tied": ("llama", 1, {"more": {"tie_word_embeddings": True}}),
    "llama, 3 heads of keys": ("llama", 1, {"more": THREE_HEADS}),
    "llama, accumulation": ("llama", 2, {"micro_batch_size": 2}),
    "qwen3": ("qwen3", 1, {}),
    "GPT-2 by nn.Linear": ("gpt_bigcode", 1, {}),
}


def check_losses(run_dir: Path, kind: str, more: dict[str, Any]) -> None:
    losses, norms, validation = plain(kind, **more)
    assert max(norms) > CLIPPING
    assert reported(run_dir, "training", "loss") == pytest.approx(losses, abs=1e-5)
    assert reported(run_dir, "training", "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert reported(run_dir, "validation", "validation_loss") == pytest.approx([validation], abs=1e-5)
    assert reported(run_dir, "validation", "validated") == [5], "each sample counts once"


@pytest.mark.parametrize("name", CASES)
def test_losses_are_those_of_plain_pytorch(name: str, two_ranks: Ranks, tmp_path: Path) -> None:
    """``model_parallel_size`` alone asks for it, and each rank holds half of every layer."""
    kind, stage, given = CASES[name]
    ranks = two_ranks.run(run, tmp_path, hyperparameters(kind, stage, **given))
    check_losses(tmp_path, kind, given.get("more", {}))
    for rank in ranks:
        assert (rank["replica"], rank["batch_size"]) == (0, BATCH)
        if name == "llama, ZeRO 0":
            layer = "model.layers.0."
            assert rank["shapes"][layer + "self_attn.q_proj.weight"] == (16, 32)
            assert rank["shapes"][layer + "self_attn.o_proj.weight"] == (32, 16)
            assert rank["shapes"][layer + "mlp.up_proj.weight"] == (32, 32)
            assert rank["shapes"]["model.embed_tokens.weight"] == (VOCABULARY, 32)
    written = json.loads((tmp_path / "deepspeed_config.json").read_text())["tensor_parallel"]
    assert written["autotp_size"] == 2


@pytest.mark.parametrize("stage", [1, 3])
def test_two_replicas_of_two_ranks_each(stage: int, four_ranks: Ranks, tmp_path: Path) -> None:
    ranks = four_ranks.run(run, tmp_path, hyperparameters("llama", stage))
    check_losses(tmp_path, "llama", {})
    assert [rank["replica"] for rank in ranks] == [0, 0, 1, 1]


# --------------------------------------------------------------------------------------- dropout


def dropped(run_dir: Path, hparams: dict[str, Any]) -> list[float]:
    """In each rank, some of what the model returns in training mode after a step: equal where its dropout is."""
    trial = train(run_dir, trial_class(), hparams, steps=2)
    trial.engine.train()
    tokens = torch.stack([each for each, _ in samples(4)])
    with torch.no_grad():
        found = trial.engine(input_ids=tokens, use_cache=False).logits.flatten()[::97]
    return [float(each) for each in found]


def test_ranks_draw_the_same_dropout_for_what_they_share(two_ranks: Ranks, tmp_path: Path) -> None:
    """Without it their residual streams would be different ones, and no error would say so."""
    more = {"resid_pdrop": 0.3, "embd_pdrop": 0.3, "attn_pdrop": 0.3}
    first, second = two_ranks.run(dropped, tmp_path, hyperparameters("gpt_bigcode", 1, more=more))
    assert first == second


# --------------------------------------------------------------------------------------- refused


def refusal(run_dir: Path, hparams: dict[str, Any]) -> str:
    from determined_ds import open_context

    with (
        open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context,
        pytest.raises(ConfigError) as caught,
    ):
        trial_class()(context)
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "given", "message"),
    [
        ("gpt2", {}, "its matrices are Conv1D, which hold the transposed weights"),
        (
            "llama",
            {"more": {**THREE_HEADS, "attention_dropout": 0.1}},
            "so the ranks would draw different dropout",
        ),
        (
            "llama",
            {"ds_config": {"tensor_parallel": {"partition_config": NOTHING_CUT}}},
            "none of its layers was cut",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused(
    kind: str, given: dict[str, Any], message: str, two_ranks: Ranks, tmp_path: Path
) -> None:
    for said in two_ranks.run(refusal, tmp_path, hyperparameters(kind, 1, **given)):
        assert "hyperparameters.model_parallel_size = 2" in said
        assert message in said
        assert "fix: " in said
