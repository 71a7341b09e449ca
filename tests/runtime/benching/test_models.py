"""The transformers that are measured have the parameters and operations that are counted of them."""

from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from determined_ds.errors import ConfigError
from determined_ds.runtime.benching.decoder import Decoder
from determined_ds.runtime.benching.model_sizes import shape_named, step_flops


@pytest.mark.parametrize("name", ["1x64", "3x128"])
def test_parameters_and_operations_are_counted_right(name: str) -> None:
    shape = shape_named(name, "cpu")
    model = Decoder(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == shape.num_parameters
    # The counter knows nothing of the fused attention of CPUs.
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(model.random_tokens(2)).backward()
    assert counter.get_total_flops() == pytest.approx(2 * step_flops(shape), rel=1e-3)


def test_its_loss_falls() -> None:
    torch.manual_seed(0)
    model = Decoder(shape_named("1x64", "cpu"))
    optimizer, tokens = torch.optim.AdamW(model.parameters(), lr=3e-3), model.random_tokens(2)
    losses = []
    for _ in range(8):
        losses.append(loss := model(tokens))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]


def test_on_gpus_it_is_gpt_2s_size() -> None:
    assert shape_named("12x768", "cuda").num_parameters == 124_439_808


@pytest.mark.parametrize("name", ["", "12", "x64", "0x64", "2x100", "2x-64", "99999x64", "2x64x2"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=r"--models.*must be LAYERSxWIDTH.*\n  fix: e.g. 6x384"):
        shape_named(name, "cpu")
