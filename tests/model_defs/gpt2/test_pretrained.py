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


def all_layers() -> nn.ModuleList:
    return nn.ModuleList(spec.build() for spec in pipeline_layers(CONFIG)[:-1])


def assert_loaded(module: nn.Module, trained: transformers.GPT2LMHeadModel) -> None:
    expected = trained.state_dict()
    for name, parameter in parameters_by_huggingface_name(module).items():
        assert torch.equal(parameter, expected[name]), name


def whole_file(trained, folder):
    trained.save_pretrained(folder)


def shards(trained, folder):
    trained.save_pretrained(folder, max_shard_size="500KB")
    assert len(list(folder.glob("*.safetensors"))) > 1


def published_names(trained, folder):
    """As the first GPT-2 was published: no prefix, and the causal mask among the tensors."""
    trained.save_pretrained(folder)
    file = folder / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    save_file({**tensors, "h.0.attn.bias": torch.ones(1, 1, 16, 16)}, file, metadata={"format": "pt"})


def torch_file(trained, folder):
    CONFIG.save_pretrained(folder)
    torch.save(trained.state_dict(), folder / "pytorch_model.bin")


@pytest.mark.parametrize("save", [whole_file, shards, published_names, torch_file])
@pytest.mark.parametrize("form", [lambda: GPT2(CONFIG), all_layers], ids=["whole", "layers"])
def test_round_trip(save, form, trained, tmp_path):
    save(trained, tmp_path)
    module = form()
    load_pretrained(module, str(tmp_path))
    assert_loaded(module, trained)


# --- what cannot be loaded ---


def refused(source, module=None):
    found = refusal(lambda: load_pretrained(module or GPT2(CONFIG), str(source)))
    assert (found.key, found.value) == ("hyperparameters.pretrained", str(source))
    return found


def tensor_missing_in_torch_file(trained, folder):
    """It must not be drawn at random."""
    CONFIG.save_pretrained(folder)
    tensors = trained.state_dict()
    del tensors["transformer.h.2.ln_1.bias"]
    torch.save(tensors, folder / "pytorch_model.bin")


def shard_missing(trained, folder):
    shards(trained, folder)
    min(folder.glob("model-*.safetensors")).unlink()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (tensor_missing_in_torch_file, "transformer.h.2.ln_1.bias is missing"),
        (shard_missing, "model-00001-of-"),
    ],
)
def test_what_cannot_be_loaded_is_named(damage, said, trained, tmp_path):
    damage(trained, tmp_path)
    assert said in refused(tmp_path).message


def test_other_shapes_are_named_and_nothing_is_changed(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    wider = gpt2_config("small", vocab_size=256, sequence_length=16)
    wider.n_layer = 1
    model = GPT2(wider)
    load_initial_weights(model, wider, 0)
    before = model.transformer.ln_f.weight.clone()
    found = refused(tmp_path, model)
    assert "transformer.wte.weight has the shape (61, 128), and (256, 768) in the model" in found.message
    assert torch.equal(model.transformer.ln_f.weight, before)
