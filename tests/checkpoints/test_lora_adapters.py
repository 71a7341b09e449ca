"""An export of any kind of LoRA is what peft itself writes, and with ``--merge-lora`` what peft merges, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import safetensors.torch
import torch
import transformers

from tests.checkpoints.command import succeeded
from tests.checkpoints.making import made
from tests.interrupted.compared import differences
from tests.model_defs import tiny

KINDS: dict[str, dict[str, Any]] = {
    "dora": {"use_dora": True},
    "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    "whole head": {"modules_to_save": ["lm_head"]},
    "rank of its own": {"rank_pattern": {"v_proj": 2}, "alpha_pattern": {"q_proj": 3}},
}
SIZES = {**tiny.SIZES, "vocab_size": 64}
LORA = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]}
TRIAL = """
import peft, torch, transformers
from determined_ds import DataParallelTrial

class Adapted(DataParallelTrial):
    def build_model(self):
        hparams = self.context.get_hparams()
        config = torch.load("config.pt", weights_only=False)  # an object: only checkpoints are held to be data
        model = transformers.LlamaForCausalLM(config).bfloat16()
        return peft.get_peft_model(model, peft.LoraConfig(**hparams["lora"]), autocast_adapter_dtype=False)

    loss = build_training_data_loader = build_validation_data_loader = None  # an export calls none of them
"""
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # by peft, of names of transformers'


@pytest.mark.parametrize("kind", KINDS)
def test_an_adapter_is_what_peft_writes_and_merged_it_is_what_peft_merges(kind: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    lora = {**LORA, **KINDS[kind]}
    given = transformers.LlamaConfig(**SIZES)
    torch.save(given, tmp_path / "config.pt")
    base = transformers.LlamaForCausalLM(given).bfloat16()
    model: Any = peft.get_peft_model(base, peft.LoraConfig(**lora), autocast_adapter_dtype=False)
    with torch.no_grad():  # so that the adapters change it
        for name, parameter in model.named_parameters():
            if "lora_" in name or "modules_to_save" in name:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    tensors = {
        name: {"weight": ("BF16", tensor.float().numpy())} for name, tensor in model.state_dict().items()
    }
    (tmp_path / "adapted_trial.py").write_text(TRIAL)
    hparams = {"global_batch_size": 8, "deepspeed_config": {}, "lora": lora}
    loaded = {"trial_cls_spec": "adapted_trial:Adapted", "hparams": hparams, "experiment_config": {}}
    path = made(tmp_path / "uuid", tensors, ranks=2, files={"load_data.json": json.dumps(loaded)})

    def exported(out: Path, *options: str) -> dict[str, torch.Tensor]:
        words = ["--to", "huggingface", "--context-dir", tmp_path, "--output", out, *options]
        succeeded("export", path, *words)
        (file,) = out.glob("*.safetensors")
        return safetensors.torch.load_file(file)

    model.save_pretrained(tmp_path / "by_peft", save_embedding_layers=False)
    by_peft = safetensors.torch.load_file(tmp_path / "by_peft/adapter_model.safetensors")
    assert differences(exported(tmp_path / "adapter"), by_peft) == []
    config = peft.PeftConfig.from_pretrained(str(tmp_path / "adapter"))
    assert (config.peft_type, config.r) == ("LORA", 4)
    merged = dict(model.merge_and_unload().state_dict())
    assert differences(exported(tmp_path / "merged", "--merge-lora"), merged) == []
