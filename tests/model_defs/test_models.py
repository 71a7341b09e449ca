"""What holds of every model: its seed decides its weights, no setting of memory changes a gradient, matrices decay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from model_defs.bert import model as bert
from model_defs.causal_lm import config as causal_config
from model_defs.causal_lm import model as causal_lm
from model_defs.common.classifier import build_classifier, classifier_config
from model_defs.common.parameters import decay_groups
from model_defs.dcgan import model as dcgan
from model_defs.dcgan.trial import FrechetDistance, sums_of
from model_defs.drivable_vit import model as drivable_vit
from model_defs.gpt2 import model as gpt2
from model_defs.vit import model as vit
from tests.model_defs import tiny

CLASSES = ["bread", "cake", "tea"]
GPT2 = gpt2.gpt2_config(gpt2.Options(sequence_length=16), num_tokens=61)
DRIVABLE = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "spatial_layers": 1, "num_heads": 2}
DCGAN = {"image_size": 16, "latent_size": 6, "generator_features": 8, "discriminator_features": 4}


def built_bert(seed: int = 3) -> Any:
    options = bert.Options(dropout=0.0)
    config = bert.bert_config(options, CLASSES, vocab_size=300)
    return build_classifier(transformers.BertForSequenceClassification, options, config, head=(), seed=seed)


def built_vit(seed: int = 3) -> Any:
    options = vit.Options()
    config = classifier_config(transformers.ViTConfig, options, CLASSES, **vit.MODEL_SIZES["tiny"])
    return build_classifier(transformers.ViTForImageClassification, options, config, head=(), seed=seed)


def built_gpt2(seed: int = 3) -> Any:
    model = gpt2.GPT2(GPT2)
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


@pytest.mark.parametrize(("name", "no_decay"), [("bert", ()), ("vit", vit.NO_DECAY)])
def test_matrices_decay_and_biases_norms_and_positions_of_images_do_not(
    name: str, no_decay: tuple[str, ...]
) -> None:
    model = BUILT[name](3)
    decayed, kept = decay_groups(model, no_decay)
    assert ("weight_decay" in decayed, kept["weight_decay"]) == (False, 0.0)
    spared = {
        id(parameter)
        for key, parameter in model.named_parameters()
        if parameter.ndim < 2 or key.endswith(("cls_token", "vit.embeddings.position_embeddings"))
    }
    assert {id(each) for each in kept["params"]} == spared
    assert {id(each) for each in decayed["params"]} == {id(each) for each in model.parameters()} - spared


def test_the_frechet_distance_is_that_of_two_normal_distributions() -> None:
    """Of colours that do not depend on each other: |mean difference|² + the sum of (std1 - std2)²."""
    torch.manual_seed(0)
    real, generated = (torch.randn(20_000, 1, 8, 8) * std + mean for std, mean in ((1.0, 0.0), (0.5, 0.1)))
    sums = torch.stack([sums_of(real), sums_of(generated)])
    distance = FrechetDistance().metric
    assert distance(sums) == pytest.approx(64 * (0.1**2 + 0.5**2), rel=0.02)
    assert distance(sums[:1].expand(2, -1, -1)) == pytest.approx(0, abs=1e-9)
