"""DeepSpeed's Muon: the same training under every ZeRO stage, as long as nothing is clipped; resumed under any."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.checkpoints.strategies import run
from tests.harness.ranks import Ranks, RanksFailed
from tests.package import records, tensors
from tests.trial.regression import train, trial_class

STEPS = 6
ZERO = "zero_optimization"
PARAMS = {"lr": 0.02, "adam_lr": 0.001, "momentum": 0.95, "weight_decay": 0.01, "torch_adam": True}
MUON = {"type": "Muon", "params": PARAMS}
SETTINGS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {},
    "ZeRO 1": {ZERO: {"stage": 1}},
    "ZeRO 2": {ZERO: {"stage": 2}},
    "ZeRO 3": {ZERO: {"stage": 3, "reduce_scatter": False}},
    "ZeRO 0, clipped": {"gradient_clipping": 1.0},
}


class Small(torch.nn.Module):
    """Two matrices for Muon; the embedding, the head and the biases for Adam, by their names and shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(32, 16)
        self.a, self.b = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
        self.lm_head = torch.nn.Linear(16, 32, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.embed(tokens)
        logits: torch.Tensor = self.lm_head(found + self.b(torch.tanh(self.a(found))))
        return logits


def loss_of(self: Any, model: Any, batch: Any) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def data_of(self: Any) -> Any:
    tokens = torch.randint(0, 32, (STEPS * 8, 9), generator=torch.Generator().manual_seed(1))
    return self.training_loader(torch.utils.data.TensorDataset(tokens, (tokens * 3 + 1) % 32))


def run_each(run_dir: Path, settings: dict[str, dict[str, Any]]) -> None:
    """In a rank: with each setting."""
    methods = {
        "loss": loss_of,
        "build_training_data_loader": data_of,
        "build_validation_data_loader": data_of,
    }
    for name, changes in settings.items():
        torch.manual_seed(0)
        trial = trial_class(build_model=lambda self: Small(), **methods)
        ds_config = {"optimizer": MUON, "gradient_clipping": 0.0, **changes}
        train(run_dir / name, trial, {"deepspeed_config": ds_config}, steps=STEPS)


def test_the_same_losses(two_ranks: Ranks, tmp_path: Path) -> None:
    """Clipping scales a gradient, which Muon does not look at; of Adam's part little is left to see."""
    two_ranks.run(run_each, tmp_path, SETTINGS)
    expected, *others = ([m["loss"] for _, m in records(tmp_path / name, "training")] for name in SETTINGS)
    for name, losses in zip([*SETTINGS][1:], others, strict=True):
        assert losses == pytest.approx(expected, rel=1e-3 if "clipped" in name else 1e-5), name


LAYOUTS: dict[str, dict[str, Any]] = {
    "ZeRO 0": {"zero": {"stage": 0}},
    "ZeRO 2": {"zero": {"stage": 2}},
    "ZeRO 3": {"zero": {"stage": 3, "reduce_scatter": False}},
}
DS: dict[str, Any] = {"optimizer": MUON, "scheduler": None, "gradient_clipping": 0.0}


def held_in(checkpoint: str) -> dict[tuple[str, str], torch.Tensor]:
    """A checkpoint's tensors; the weights by one name, whether it has copies of them or not."""
    names, found = {"fp32": "weight"}, dict[tuple[str, str], torch.Tensor]()
    for (name, state), each in sorted(
        tensors(Path(checkpoint)).items(), key=lambda item: item[0][1] != "fp32"
    ):
        found.setdefault((name, names.get(state, state)), each.float())
    return found


def test_one_rank_without_zero_continues_with_what_two_under_zero_3_wrote(
    two_ranks: Ranks, one_rank: Ranks, tmp_path: Path
) -> None:
    """Weights, momenta and Adam's states are the same, bit for bit, and so are the steps to rounding."""
    layout, other, more = LAYOUTS["ZeRO 3"], LAYOUTS["ZeRO 0"], {"overwrite_deepspeed_args": DS}
    (whole, _) = two_ranks.run(run, layout, str(tmp_path), steps=5, **more)
    saved, again = tmp_path / "a", tmp_path / "b"
    two_ranks.run(run, layout, str(tmp_path), write=saved, steps=3, **more)
    [rest] = one_rank.run(run, other, str(tmp_path), read=saved, first=3, steps=2, **more)
    assert rest == pytest.approx(whole[3:], rel=1e-6)
    one_rank.run(run, other, str(tmp_path), read=saved, write=again, **more)
    was, now = held_in(saved), held_in(again)
    assert was.keys() == now.keys()
    assert any(state == "momentum_buffer" for _, state in was)
    assert all(torch.equal(was[key], now[key]) for key in was)
    # Under ZeRO 1 and 2 Muon keeps the momentum of whole matrices.
    with pytest.raises(RanksFailed, match="only the ranks and the strategy that wrote them"):
        one_rank.run(run, LAYOUTS["ZeRO 2"], str(tmp_path), read=saved, **more)


def left_to_adam(run_dir: Path, kind: str) -> set[str]:
    """In a rank: the names of the matrices that Adam steps."""
    from determined_ds import open_context

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "llama":
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    elif kind == "gpt2":
        config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
        model = transformers.GPT2LMHeadModel(config)
    else:
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        model[1].weight.use_muon = False
    hparams = {"global_batch_size": 8, "deepspeed_config": {"optimizer": MUON}}
    with open_context(hparams=hparams, run_dir=run_dir, accelerator="cpu") as context:
        engine = trial_class(build_model=lambda self: model)(context).engine
    named = engine.module.named_parameters()
    return {name for name, each in named if not each.use_muon and each.ndim > 1}


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("llama", {"model.embed_tokens.weight", "lm_head.weight"}),
        ("gpt2", {"transformer.wte.weight", "transformer.wpe.weight"}),
        ("a model that says use_muon = False", {"1.weight"}),
    ],
)
def test_embeddings_heads_and_what_a_model_names_are_left_to_adam(
    one_rank: Ranks, tmp_path: Path, kind: str, names: set[str]
) -> None:
    assert one_rank.run(left_to_adam, tmp_path, kind) == [names]
