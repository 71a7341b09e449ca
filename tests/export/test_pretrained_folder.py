"""What from_pretrained loads from an export computes what the trained engine computes, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from determined_ds.errors import CheckpointError, ConfigError
from determined_ds.export.exporting import Exported, export
from determined_ds.export.wanted import ExportRequest
from determined_ds.protocol.checkpoint_files import checkpoints_in
from tests.export import trained
from tests.export.trained import LORA, hyperparameters
from tests.model_defs.causal_lm import tiny
from tests.ranks import ROOT, Ranks

BF16 = {"overwrite_deepspeed_args": {"bf16": {"enabled": True}}}
# Kind of model, ZeRO stage, more hyperparameters, class of transformers.
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "gpt2-zero3": ("gpt2", 3, {}, "GPT2LMHeadModel"),
    "gpt2-zero3-bf16": ("gpt2", 3, BF16, "GPT2LMHeadModel"),
    "gpt2-zero1-bf16": ("gpt2", 1, BF16, "GPT2LMHeadModel"),
    "bert-zero2": ("bert", 2, {}, "BertForSequenceClassification"),
    "vit-zero1-bf16": ("vit", 1, BF16, "ViTForImageClassification"),
    "causal-zero0": ("causal_lm", 0, {}, "LlamaForCausalLM"),
}


def checkpoint_of(run_dir: Path) -> Path:
    return checkpoints_in(run_dir / "checkpoints")[0].path


def exported(run_dir: Path, out: Path | None = None, **more: Any) -> Exported:
    given = {"to": "huggingface", "context_dir": ROOT, **more}
    return export(ExportRequest(path=checkpoint_of(run_dir), out=out or run_dir / "out", **given))


def logits_of(model: Any, kind: str) -> Any:
    given = trained.inputs(kind, model.dtype)
    given = {"input_ids" if name == "tokens_BT" else name: value for name, value in given.items()}
    with torch.no_grad():
        return model.eval()(**given).logits


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("data")
    return {"path": tiny.text_file(folder), "tokenizer": "bytes", "validation_fraction": 0.15}


def data_of(kind: str, text: dict[str, Any]) -> dict[str, Any]:
    return text if kind in ("gpt2", "gpt2_pipeline", "causal_lm") else {}


@pytest.mark.parametrize("case", CASES)
def test_from_pretrained_computes_what_the_engine_did(
    case: str, two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    kind, stage, more, name = CASES[case]
    hparams = hyperparameters(kind, stage, **more)
    two_ranks.run(trained.train, kind, str(tmp_path), hparams, data_of(kind, text))
    exported(tmp_path)
    model = getattr(transformers, name).from_pretrained(tmp_path / "out")
    expected = torch.load(tmp_path / "logits.pt")
    assert model.dtype == expected.dtype == (torch.bfloat16 if "bf16" in case else torch.float32)
    assert torch.equal(logits_of(model, kind), expected)
    assert json.loads((tmp_path / "out/config.json").read_text())["architectures"] == [name]


def test_a_pipeline_and_shards(two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]) -> None:
    hparams = hyperparameters("gpt2", 1, pipe_parallel_size=2)
    two_ranks.run(trained.train, "gpt2_pipeline", str(tmp_path), hparams, text)
    exported(tmp_path, shard_bytes=10**6)
    assert len(list((tmp_path / "out").glob("model-0000?-of-00004.safetensors"))) == 4
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    chain = load_model_from_checkpoint_path(checkpoint_of(tmp_path), context_dir=ROOT)
    with torch.no_grad():
        assert torch.equal(logits_of(model, "gpt2"), chain(trained.inputs("gpt2", None)["tokens_BT"]))


@pytest.fixture(scope="module")
def adapted(
    two_ranks: Ranks, text: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A LoRA of a saved model, trained under ZeRO 3 in bf16; and that model."""
    run_dir, base = tmp_path_factory.mktemp("lora"), tiny.saved_model(tmp_path_factory.mktemp("base"))
    hparams = hyperparameters("causal_lm", 3, model=str(base), lora=LORA, **BF16)
    two_ranks.run(trained.train, "causal_lm", str(run_dir), hparams, text)
    return run_dir, base


@pytest.mark.filterwarnings("ignore::FutureWarning")  # by peft, of names of transformers'
def test_an_adapter_is_read_by_peft(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    import peft

    run_dir, base = adapted
    out = exported(run_dir, tmp_path / "adapter").out
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model: Any = peft.PeftModel.from_pretrained(plain, str(out), autocast_adapter_dtype=False)
    assert torch.equal(logits_of(model, "causal_lm"), torch.load(run_dir / "logits.pt"))
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_merged_adapter_is_what_peft_merges(adapted: tuple[Path, Path], tmp_path: Path) -> None:
    """To the bit."""
    import peft

    run_dir, base = adapted
    adapter = exported(run_dir, tmp_path / "adapter").out
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    given: Any = peft.PeftModel.from_pretrained(plain, str(adapter), autocast_adapter_dtype=False)
    expected = given.merge_and_unload().state_dict()
    merged = exported(run_dir, tmp_path / "merged", merge_lora=True).out
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_names_that_are_no_models_are_refused(two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]) -> None:
    """By what does not fit, for a configuration of another model."""
    hparams = hyperparameters("causal_lm", 0)
    two_ranks.run(trained.train, "causal_lm", str(tmp_path), hparams, text)
    config = transformers.LlamaConfig(**{**tiny.SIZES, "num_hidden_layers": 1}, vocab_size=300)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ConfigError) as caught:
        exported(tmp_path, config=tmp_path / "other")
    assert "model.embed_tokens.weight has shape (256, 32) in the checkpoint, and (300, 32)" in str(
        caught.value
    )
    assert "model.layers.1.self_attn.q_proj.weight (32, 32) is not in it" in str(caught.value)
    with pytest.raises(ConfigError, match="no adapters of peft"):
        exported(tmp_path, merge_lora=True)
    with pytest.raises(CheckpointError, match="no average of a callback 'ema'; it has: none"):
        exported(tmp_path, average="ema")
    assert not list(tmp_path.glob("*out*"))
