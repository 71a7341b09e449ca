"""What holds of every model: its seed decides its weights, no setting of memory changes a gradient, matrices decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from model_defs.bert import model as bert
from model_defs.causal_lm import config as causal_config
from model_defs.causal_lm import model as causal_lm
from model_defs.common.parameters import decay_groups
from model_defs.common.text import next_token_loss
from model_defs.dcgan import model as dcgan
from model_defs.drivable_vit import model as drivable_vit
from model_defs.gpt2 import model as gpt2
from model_defs.vit import model as vit
from tests.model_defs.causal_lm import tiny

CLASSES = ["bread", "cake", "tea"]
GPT2 = gpt2.gpt2_config("tiny", vocab_size=61, sequence_length=16, dropout=0.1)
DRIVABLE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "spatial_layers": 1, "num_heads": 2}
DCGAN = {"image_size": 16, "latent_size": 6, "generator_features": 8, "discriminator_features": 4}


def built_bert(seed: int = 3) -> Any:
    options = bert.Options(dropout=0.0)
    return bert.build_bert(options, bert.bert_config(options, CLASSES, vocab_size=300), seed)


def built_vit(seed: int = 3) -> Any:
    options = vit.Options()
    return vit.build_vit(options, vit.vit_config(options, CLASSES), seed)


def built_gpt2(seed: int = 3) -> gpt2.GPT2:
    model = gpt2.GPT2(GPT2).train()
    gpt2.load_initial_weights(model, GPT2, seed)
    return model


def built_causal_lm(seed: int = 3) -> Any:
    config = causal_config.read_config(None, tiny.MODEL_CONFIG, vocab_size=256)
    return causal_lm.build_model(config, None, seed=seed, dtype=torch.float32, zero3=None)


BUILT: dict[str, Callable[[int], nn.Module]] = {
    "bert": built_bert,
    "causal_lm": built_causal_lm,
    "dcgan's generator": lambda seed: dcgan.Generator(dcgan.dcgan_config(DCGAN), seed=seed),
    "dcgan's discriminator": lambda seed: dcgan.Discriminator(dcgan.dcgan_config(DCGAN), seed=seed),
    "drivable_vit": lambda seed: drivable_vit.DrivableViT(drivable_vit.model_config(DRIVABLE), seed=seed),
    "gpt2": built_gpt2,
    "vit": built_vit,
}


@pytest.mark.parametrize("name", BUILT)
def test_the_seed_alone_decides_the_weights(name: str) -> None:
    first, other = BUILT[name](3).state_dict(), BUILT[name](4).state_dict()
    torch.rand(7)
    again = BUILT[name](3).state_dict()
    assert all(torch.equal(value, again[key]) for key, value in first.items())
    assert not all(torch.equal(value, other[key]) for key, value in first.items())


def test_full_size_parameters() -> None:
    """Those of DCGAN as published, group norms for batch norms; of the drivable-space model, twelve ViT-Base blocks."""
    with torch.device("meta"):
        generator, discriminator = (
            dcgan.Generator(dcgan.DCGANConfig()),
            dcgan.Discriminator(dcgan.DCGANConfig()),
        )
        drivable = drivable_vit.DrivableViT(drivable_vit.DrivableViTConfig())
    assert sum(p.numel() for p in generator.parameters()) == 3_576_704
    assert sum(p.numel() for p in discriminator.parameters()) == 2_765_568
    blocks = [p.numel() for name, p in drivable.named_parameters() if name.split(".")[1].isdigit()]
    assert sum(blocks) == 12 * 7_087_872


@pytest.mark.parametrize("interval", [1, 2, 3, 9])
def test_no_interval_of_checkpoints_changes_a_gradient_of_gpt2(interval: int) -> None:
    tokens_BT = torch.randint(0, 61, (2, 17), generator=torch.Generator().manual_seed(0))
    results = []
    for each in (0, interval):
        model = built_gpt2()
        model.activation_checkpoint_interval = each
        calls: list[int] = []
        for block in model.transformer.h:
            block.register_forward_pre_hook(lambda *args, seen=calls: seen.append(1))
        torch.manual_seed(2)
        loss = next_token_loss(model(tokens_BT[:, :-1]), tokens_BT[:, 1:])
        loss.backward()
        results.append((loss.item(), [p.grad for p in model.parameters()]))
        assert len(calls) == (8 if each else 4), "each block once, or once more on the way back"
    (before, gradients), (after, again) = results
    assert before == after
    assert all(torch.equal(a, b) for a, b in zip(gradients, again, strict=True))


@pytest.mark.parametrize(("name", "no_decay"), [("bert", ()), ("vit", vit.NO_DECAY)])
def test_matrices_decay_and_biases_norms_and_positions_of_images_do_not(
    name: str, no_decay: tuple[str, ...]
) -> None:
    model = BUILT[name](3)
    decayed, kept = decay_groups(model, no_decay)
    assert ("weight_decay" in decayed, kept["weight_decay"]) == (False, 0.0)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    of_groups = [{names[id(each)] for each in group["params"]} for group in (decayed, kept)]
    spared = {
        key
        for key, parameter in model.named_parameters()
        if parameter.ndim < 2 or key.endswith(("cls_token", "vit.embeddings.position_embeddings"))
    }
    assert of_groups == [set(names.values()) - spared, spared]
