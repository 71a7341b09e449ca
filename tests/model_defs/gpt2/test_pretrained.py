"""A Hugging Face checkpoint loads into the whole GPT-2 and into its pipeline layers, or says why not."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from determined_ds.errors import ConfigError
from model_defs.gpt2.model import (
    GPT2,
    gpt2_config,
    load_initial_weights,
    parameters_by_huggingface_name,
    pipeline_layer_plan,
)
from model_defs.gpt2.pretrained import load_pretrained

CONFIG = gpt2_config("tiny", vocab_size=61, sequence_length=16)


@pytest.fixture(scope="module")
def trained() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(5)
    return transformers.GPT2LMHeadModel(CONFIG)


def all_layers() -> nn.ModuleList:
    return nn.ModuleList(planned.layer(*planned.args) for planned in pipeline_layer_plan(CONFIG)[:-1])


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


def test_one_layer_takes_only_its_own(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    planned = pipeline_layer_plan(CONFIG)[3]
    block = planned.layer(*planned.args)
    load_pretrained(block, tmp_path)
    assert_loaded(block, trained)


def test_what_is_trained_here_loads_there(tmp_path):
    model = GPT2(CONFIG)
    load_initial_weights(model, CONFIG, 3)
    model.save_pretrained(tmp_path)
    assert_loaded(model, transformers.GPT2LMHeadModel.from_pretrained(tmp_path))


# --- what cannot be loaded ---


def refusal(source, module=None):
    with pytest.raises(ConfigError) as caught:
        load_pretrained(module or GPT2(CONFIG), str(source))
    (problem,) = caught.value.problems
    assert problem.key == "hyperparameters.pretrained"
    assert problem.value == str(source)
    assert problem.fix
    return problem


def test_missing_folder(tmp_path):
    assert "no such folder" in refusal(tmp_path / "nowhere").message


def test_folder_without_weights(tmp_path):
    CONFIG.save_pretrained(tmp_path)
    assert "no weights" in refusal(tmp_path).message


def test_other_shapes_are_counted_the_first_five_shown_and_nothing_changed(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    wider = gpt2_config("small", vocab_size=256, sequence_length=16)
    wider.n_layer = 1
    model = GPT2(wider)
    load_initial_weights(model, wider, 0)
    before = model.transformer.ln_f.weight.clone()
    problem = refusal(tmp_path, model)
    assert problem.message.startswith("16 of 16 tensors do not fit")
    assert "transformer.wte.weight has the shape (61, 128), and (256, 768) in the model" in problem.message
    assert problem.message.endswith("and 11 more.")
    assert "model_size: tiny, a data.tokenizer of 61 tokens and room for 16 positions" in problem.fix
    assert torch.equal(model.transformer.ln_f.weight, before)


def test_missing_tensors(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    del tensors["transformer.h.2.ln_1.bias"]
    save_file(tensors, file, metadata={"format": "pt"})
    assert "transformer.h.2.ln_1.bias is missing" in refusal(tmp_path).message


def test_missing_tensors_of_a_torch_file_are_not_drawn_at_random(trained, tmp_path):
    CONFIG.save_pretrained(tmp_path)
    tensors = trained.state_dict()
    del tensors["transformer.h.2.ln_1.bias"]
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    assert "transformer.h.2.ln_1.bias is missing" in refusal(tmp_path).message


def test_file_cut_short(trained, tmp_path):
    trained.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    assert "model.safetensors cannot be read" in refusal(tmp_path).message


def test_missing_shard(trained, tmp_path):
    shards(trained, tmp_path)
    shard = min(tmp_path.glob("model-*.safetensors"))
    shard.unlink()
    assert f"{shard.name} cannot be read" in refusal(tmp_path).message


def test_index_that_is_none(tmp_path):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": 3}))
    with pytest.raises(ConfigError, match="is not an index"):
        load_pretrained(GPT2(CONFIG), tmp_path)
