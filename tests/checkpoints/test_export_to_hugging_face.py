"""What from_pretrained loads from an export computes what the trained engine computes, to the last bit."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from determined_ds import load_model_from_checkpoint_path
from tests.checkpoints import trained
from tests.checkpoints.command import succeeded
from tests.checkpoints.trained import LORA, hyperparameters
from tests.harness.ranks import ROOT, Ranks
from tests.model_defs import tiny
from tests.package import checkpoints

BF16 = {"overwrite_deepspeed_args": {"bf16": {"enabled": True}}}
# Kind of model, ZeRO stage, more hyperparameters, class of transformers.
CASES: dict[str, tuple[str, int, dict[str, Any], str]] = {
    "gpt2-zero3-bf16": ("gpt2", 3, BF16, "GPT2LMHeadModel"),
    "bert-zero2": ("bert", 2, {}, "BertForSequenceClassification"),
    "vit-zero1-bf16": ("vit", 1, BF16, "ViTForImageClassification"),
    "gpt2-pipeline": ("gpt2 in a pipeline", 1, {"pipe_parallel_size": 2}, "GPT2LMHeadModel"),
    "causal-zero0": ("causal_lm", 0, {}, "LlamaForCausalLM"),
}


def exported(run_dir: Path, out: Path, *options: str | Path) -> Path:
    words = ["--to", "huggingface", "--context-dir", ROOT, "--output", out]
    succeeded("export", checkpoints(run_dir)[0], *words, *options)
    return out


def logits_of(model: Any, kind: str) -> Any:
    given = trained.inputs(kind, model.dtype)
    given = {"input_ids" if name == "tokens_BT" else name: value for name, value in given.items()}
    with torch.no_grad():
        return model.eval()(**given).logits


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return tiny.text_data(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("case", CASES)
def test_from_pretrained_computes_what_the_engine_did(
    case: str, two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    kind, stage, more, name = CASES[case]
    hparams, data = hyperparameters(kind, stage, **more), {} if kind in ("bert", "vit") else text
    piped = kind == "gpt2 in a pipeline"  # whose engine gives a loss alone
    logits = None if piped else functools.partial(trained.save_logits, tmp_path, kind)
    two_ranks.run(tiny.train, tmp_path, hparams, data, 2, model=kind, then=logits)
    out = exported(tmp_path, tmp_path / "out")
    model = getattr(transformers, name).from_pretrained(out)
    if piped:
        chain = load_model_from_checkpoint_path(checkpoints(tmp_path)[0], context_dir=ROOT)
        with torch.no_grad():
            expected = chain(trained.inputs("gpt2", None)["tokens_BT"])
    else:
        expected = torch.load(tmp_path / "logits.pt")
    assert model.dtype == expected.dtype == (torch.bfloat16 if "bf16" in case else torch.float32)
    assert torch.equal(logits_of(model, kind.partition(" ")[0]), expected)
    assert json.loads((out / "config.json").read_text())["architectures"] == [name]


@pytest.mark.filterwarnings("ignore::FutureWarning")  # by peft, of names of transformers'
def test_an_adapter_is_read_by_peft_and_merged_as_peft_does(
    two_ranks: Ranks, tmp_path: Path, text: dict[str, Any]
) -> None:
    """Of a saved model, trained under ZeRO 3 in bf16."""
    import peft

    base = tiny.saved_model(tmp_path / "base")
    hparams = hyperparameters("causal_lm", 3, model=str(base), lora=LORA, **BF16)
    logits = functools.partial(trained.save_logits, tmp_path, "causal_lm")
    two_ranks.run(tiny.train, tmp_path, hparams, text, 2, then=logits)
    out = exported(tmp_path, tmp_path / "adapter")
    plain = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16)
    model: Any = peft.PeftModel.from_pretrained(plain, str(out), autocast_adapter_dtype=False)
    assert torch.equal(logits_of(model, "causal_lm"), torch.load(tmp_path / "logits.pt"))
    assert json.loads((out / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)

    expected = model.merge_and_unload().state_dict()
    merged = exported(tmp_path, tmp_path / "merged", "--merge-lora")
    found = transformers.AutoModelForCausalLM.from_pretrained(merged).state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
