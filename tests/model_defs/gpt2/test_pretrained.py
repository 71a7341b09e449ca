"""A Hugging Face checkpoint loads into the whole GPT-2 and into its pipeline layers, or says why not."""

from __future__ import annotations

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from model_defs.gpt2.model import (
    GPT2,
    gpt2_config,
    load_initial_weights,
    parameters_by_huggingface_name,
    pipeline_layers,
)
from model_defs.gpt2.pretrained import load_pretrained
from tests.package import refusal

CONFIG = gpt2_config("tiny", vocab_size=61, sequence_length=16)


@pytest.fixture(scope="module")
def trained() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(5)
    return transformers.GPT2LMHeadModel(CONFIG)


def shards(trained, folder):
    trained.save_pretrained(folder, max_shard_size="500KB")


def published_names(trained, folder):
    """As the first GPT-2 was published: no prefix, and the causal mask among the tensors."""
    trained.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}, file, metadata={"format": "pt"})


def torch_file(trained, folder, without=()):
    CONFIG.save_pretrained(folder)
    tensors = {name: tensor for name, tensor in trained.state_dict().items() if name not in without}
    torch.save(tensors, folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [shards, published_names, torch_file])
def test_round_trip(save, trained, tmp_path):
    save(trained, tmp_path)
    expected = trained.state_dict()
    layers = nn.ModuleList(spec.build() for spec in pipeline_layers(CONFIG)[:-1])
    for module in (GPT2(CONFIG), layers):
        load_pretrained(module, str(tmp_path))
        for name, parameter in parameters_by_huggingface_name(module).items():
            assert torch.equal(parameter, expected[name]), name


# --- what cannot be loaded ---


def refused(source, module=None):
    found = refusal(lambda: load_pretrained(module or GPT2(CONFIG), str(source)))
    assert (found.key, found.value) == ("hyperparameters.pretrained", str(source))
    return found.message


def test_what_is_missing_is_named_and_not_drawn(trained, tmp_path):
    torch_file(trained, tmp_path / "torch", without=("transformer.h.2.ln_1.bias",))
    assert "transformer.h.2.ln_1.bias is missing" in refused(tmp_path / "torch")
    shards(trained, tmp_path / "shards")
    min((tmp_path / "shards").glob("model-*.safetensors")).unlink()
    assert "model-00001-of-" in refused(tmp_path / "shards")


def test_other_shapes_are_named_and_nothing_is_changed(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    wider = gpt2_config("small", vocab_size=256, sequence_length=16)
    wider.n_layer = 1
    model = GPT2(wider)
    load_initial_weights(model, wider, 0)
    before = model.transformer.ln_f.weight.clone()
    said = "transformer.wte.weight has the shape (61, 128), and (256, 768) in the model"
    assert said in refused(tmp_path, model)
    assert torch.equal(model.transformer.ln_f.weight, before)
