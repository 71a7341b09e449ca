"""GPT-2 whole and GPT-2 in pipeline layers are one model: same names, same weights, same numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from model_defs.common.text import next_token_loss
from model_defs.gpt2.model import (
    GPT2,
    gpt2_config,
    load_initial_weights,
    parameters_by_huggingface_name,
    pipeline_layers,
)

SEED = 17


class Pipeline(nn.Module):
    """The plan composed in one process, as DeepSpeed composes it over many: a tied layer is built once."""

    def __init__(self, config: transformers.GPT2Config) -> None:
        super().__init__()
        self.parts = nn.ModuleList()
        self.calls = []
        tied: dict[str, nn.Module] = {}
        for spec in pipeline_layers(config):
            key = getattr(spec, "key", None)
            part = tied.get(key or "") or spec.build()
            if key:
                tied[key] = part
            self.parts.append(part)
            self.calls.append((getattr(spec, "forward_fn", None), part))

    def forward(self, hidden: Tensor) -> Tensor:
        for forward_fn, part in self.calls:
            hidden = forward_fn(part, hidden) if forward_fn else part(hidden)
            assert hidden.is_floating_point()
        return hidden


CONFIG = gpt2_config("tiny", vocab_size=61, sequence_length=16)
DRAWN = torch.randint(61, (3, 17), generator=torch.Generator().manual_seed(0))
TOKENS_BT, TARGETS_BT = DRAWN[:, :-1], DRAWN[:, 1:]


def started(model: Any) -> Any:
    load_initial_weights(model, CONFIG, SEED)
    return model


@pytest.fixture
def whole() -> GPT2:
    return started(GPT2(CONFIG))


@pytest.fixture
def pipeline() -> Pipeline:
    return started(Pipeline(CONFIG))


# --- one model in two forms ---


def test_whole_model_is_hugging_faces_own(whole):
    theirs = transformers.GPT2LMHeadModel(CONFIG)
    assert whole.state_dict().keys() == theirs.state_dict().keys()
    theirs.load_state_dict(whole.state_dict())
    torch.testing.assert_close(whole(TOKENS_BT), theirs(TOKENS_BT).logits, rtol=0, atol=1e-6)
    assert whole.lm_head.weight is whole.transformer.wte.weight


def test_both_forms_have_the_same_gradients_the_tied_weight_included(whole, pipeline):
    assert torch.equal(whole(TOKENS_BT), pipeline(TOKENS_BT))
    for model in (whole, pipeline):
        next_token_loss(model(TOKENS_BT), TARGETS_BT).backward()
    theirs = parameters_by_huggingface_name(pipeline)
    for name, parameter in parameters_by_huggingface_name(whole).items():
        torch.testing.assert_close(theirs[name].grad, parameter.grad, rtol=1e-5, atol=1e-7, msg=name)
    # A token that was never read still gets a gradient: the head's.
    unread = min(set(range(61)) - set(TOKENS_BT.flatten().tolist()))
    assert theirs["transformer.wte.weight"].grad[unread].abs().sum() > 0


# --- initial weights ---


def test_initial_weights_are_the_same_in_either_form_and_alone(whole, pipeline):
    of_whole = parameters_by_huggingface_name(whole)
    of_layers = parameters_by_huggingface_name(pipeline)
    assert of_whole.keys() == of_layers.keys()
    assert all(torch.equal(of_whole[name], of_layers[name]) for name in of_whole)
    alone = started(pipeline_layers(CONFIG)[5].build())
    for name, parameter in parameters_by_huggingface_name(alone).items():
        assert torch.equal(parameter, of_whole[name]), name


def test_initial_weights_follow_the_published_distribution(whole):
    residual_std = 0.02 / math.sqrt(2 * CONFIG.n_layer)
    for name, parameter in whole.named_parameters():
        if name.endswith(".bias"):
            assert not parameter.any(), name
        elif ".ln_" in name:
            assert (parameter == 1).all(), name
        else:
            std = residual_std if name.endswith("c_proj.weight") else 0.02
            tolerance = 5 * std / math.sqrt(parameter.numel())
            assert abs(parameter.mean().item()) < tolerance, name
            assert abs(parameter.std().item() - std) < tolerance, name
