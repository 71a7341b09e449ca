"""DeepSpeed's Muon: the same training under every ZeRO stage, as long as nothing is clipped; resumed under any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from tests.ranks import Ranks
from tests.runtime.checkpoints.strategies import contents, run

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
    "ZeRO 1, clipped": {ZERO: {"stage": 1}, "gradient_clipping": 1.0},
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


def losses(settings: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    """In a rank: of each setting, the mean loss of every step."""
    import deepspeed
    import torch.distributed as dist

    from determined_ds.runtime.upstream import load_deepspeed

    load_deepspeed("cpu")
    deepspeed.init_distributed("gloo", auto_mpi_discovery=False)
    found: dict[str, list[float]] = {}
    for name, changes in settings.items():
        torch.manual_seed(0)
        model = Small()
        ds = {"train_micro_batch_size_per_gpu": 4, "optimizer": MUON, "gradient_clipping": 0.0, **changes}
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=ds)
        found[name] = []
        for step in range(STEPS):
            drawn = torch.Generator().manual_seed(2 * step + dist.get_rank())
            tokens = torch.randint(0, 32, (4, 9), generator=drawn)
            loss = torch.nn.functional.cross_entropy(
                engine(tokens).flatten(0, 1), ((tokens * 3 + 1) % 32).flatten()
            )
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found[name].append(total.item() / 2)
    return found


@pytest.fixture(scope="module")
def measured(two_ranks: Ranks) -> dict[str, list[float]]:
    found: dict[str, list[float]] = two_ranks.run(losses, SETTINGS)[0]
    return found


@pytest.mark.parametrize("name", ["ZeRO 1", "ZeRO 2", "ZeRO 3", "ZeRO 0, clipped"])
def test_the_same_losses(measured: dict[str, list[float]], name: str) -> None:
    """Clipping scales a gradient, which Muon does not look at; of Adam's part little is left to see."""
    assert measured[name] == pytest.approx(measured["ZeRO 0"], rel=1e-3 if "clipped" in name else 1e-5)


def test_under_zero_clipping_makes_steps_smaller(measured: dict[str, list[float]]) -> None:
    """Which the rule ``muon-clipping`` warns of: what is clipped there is the update."""
    learnt = {name: found[0] - found[-1] for name, found in measured.items()}
    assert learnt["ZeRO 1, clipped"] < learnt["ZeRO 1"] / 3


SHARDED = {"reduce_scatter": False}
LAYOUTS: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero": {"stage": stage, **(SHARDED if stage == 3 else {})}} for stage in range(4)},
    **{
        f"ZeRO {stage}, bf16": {"zero": {"stage": stage, **(SHARDED if stage == 3 else {})}, "bf16": True}
        for stage in range(4)
    },
    "ZeRO 3, offloaded": {"zero": {"stage": 3, **SHARDED, "offload_optimizer": {"device": "cpu"}}},
    "pipeline": {"zero": {"stage": 0}, "pipe": 2},
    "pipeline, ZeRO 1": {"zero": {"stage": 1}, "pipe": 2},
    "interleaved": {"zero": {"stage": 1}, "pipe": 2, "schedule": "interleaved", "chunks": 2},
    "pipeline, ZeRO 1, bf16": {"zero": {"stage": 1}, "pipe": 2, "bf16": True},
}
DS: dict[str, Any] = {"optimizer": MUON, "scheduler": {}, "gradient_clipping": 0.0}


def settings(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A layout, and the JSON beside its ZeRO."""
    layout = LAYOUTS[name]
    accumulates = (
        {"data_types": {"grad_accum_dtype": "bf16"}} if "pipe" in layout and "bf16" in layout else {}
    )
    return layout, {**DS, **accumulates}


@pytest.mark.parametrize("name", LAYOUTS)
def test_it_resumes_bit_for_bit(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    layout, ds = settings(name)
    (whole, _) = two_ranks.run(run, layout, str(tmp_path), steps=5, **ds)
    saved = str(tmp_path / "a")
    (first, _) = two_ranks.run(run, layout, str(tmp_path), write=saved, steps=3, **ds)
    (rest, _) = two_ranks.run(run, layout, str(tmp_path), read=saved, first=3, steps=2, **ds)
    assert first + rest == whole


def held_in(checkpoint: str) -> dict[tuple[str, str], torch.Tensor]:
    """A checkpoint's tensors; the weights by one name, whether it has copies of them or not."""
    names, found = {"fp32": "weight"}, dict[tuple[str, str], torch.Tensor]()
    for (name, state), each in sorted(
        contents(Path(checkpoint)).items(), key=lambda item: item[0][1] != "fp32"
    ):
        found.setdefault((name, names.get(state, state)), each.float())
    return found


@pytest.mark.parametrize(
    ("wrote", "reads", "ranks"),
    [
        ("ZeRO 1", "ZeRO 3", 2),
        ("ZeRO 3", "ZeRO 0", 1),
        ("ZeRO 2", "pipeline, ZeRO 1", 2),
        ("pipeline, ZeRO 1", "ZeRO 2", 2),
        ("ZeRO 0", "ZeRO 1", 1),
        ("ZeRO 3, offloaded", "ZeRO 3", 2),
        ("pipeline, ZeRO 1", "interleaved", 2),
        ("ZeRO 1, bf16", "ZeRO 3, bf16", 2),
        ("ZeRO 3, bf16", "ZeRO 2, bf16", 2),
        ("ZeRO 2, bf16", "ZeRO 0, bf16", 2),
    ],
)
def test_any_layout_continues_with_what_another_wrote(
    two_ranks: Ranks, one_rank: Ranks, tmp_path: Path, wrote: str, reads: str, ranks: int
) -> None:
    """Weights, momenta and Adam's states are the same, bit for bit, and so are the steps to rounding."""
    (layout, ds), (other, other_ds) = settings(wrote), settings(reads)
    (whole, _) = two_ranks.run(run, layout, str(tmp_path), steps=5, **ds)
    saved, again = str(tmp_path / "a"), str(tmp_path / "b")
    two_ranks.run(run, layout, str(tmp_path), write=saved, steps=3, **ds)
    readers = two_ranks if ranks == 2 else one_rank
    rest = readers.run(run, other, str(tmp_path), read=saved, first=3, steps=2, **other_ds)[0]
    assert rest == pytest.approx(whole[3:], rel=1e-3 if "bf16" in other else 1e-6)
    readers.run(run, other, str(tmp_path), read=saved, write=again, **other_ds)
    was, now = held_in(saved), held_in(again)
    assert was.keys() == now.keys()
    assert any(state == "momentum_buffer" for _, state in was)
    assert all(torch.equal(was[key], now[key]) for key in was)


def left_to_adam(model: torch.nn.Module) -> set[str]:
    """The names of the matrices that Adam steps."""
    import deepspeed

    from determined_ds.trial.muon_parameters import told_apart

    with told_apart():
        deepspeed.set_optimizer_flags(SimpleNamespace(optimizer_name="muon", optimizer_params={}), model)
    return {name for name, each in model.named_parameters() if not each.use_muon and each.ndim > 1}


def test_embeddings_heads_and_what_a_model_names_are_left_to_adam() -> None:
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=11, **sizes))
    assert left_to_adam(llama) == {"model.embed_tokens.weight", "lm_head.weight"}
    config = transformers.GPT2Config(vocab_size=11, n_embd=8, n_layer=1, n_head=2)
    gpt2 = transformers.GPT2LMHeadModel(config)
    assert left_to_adam(gpt2) == {"transformer.wte.weight", "transformer.wpe.weight"}
    classifier = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    classifier[1].weight.use_muon = False
    assert left_to_adam(classifier) == {"1.weight"}
