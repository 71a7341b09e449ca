"""The drivable-space transformer: what attends to what, its size, its loss, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from model_defs.drivable_vit.model import DrivableViT, model_config
from tests.package import refusal

TINY = {
    "img_size": 16,
    "patch_size": 4,
    "embed_dim": 16,
    "spatial_layers": 1,
    "cross_view_layers": 1,
    "temporal_layers": 1,
    "num_heads": 2,
}


def model(**changes: int) -> DrivableViT:
    built = DrivableViT(model_config({**TINY, **changes}, num_views=3, num_moments=2))
    # At the start, what attention adds is too small to see.
    for parameter in built.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(10)
    return built


def pixels() -> torch.Tensor:
    return torch.randn(1, 2, 3, 3, 16, 16, generator=torch.Generator().manual_seed(0))


@torch.no_grad()
def touched(built: DrivableViT, moment: int, view: int) -> torch.Tensor:
    """Which (moment, view) answers otherwise when the corner of one image is another."""
    before = pixels()
    after = before.clone()
    after[0, moment, view, :, :2, :2] += 1
    # The far corner: what the decoder's own convolutions do not reach.
    return (built(after) - built(before))[0, :, :, 8:, 8:].abs().amax((-1, -2)) > 1e-6


@pytest.mark.parametrize(
    ("layers", "of_the_first", "of_the_last"),
    [
        ({}, [[1, 1, 1], [1, 1, 1]], [[0, 0, 0], [1, 1, 1]]),
        ({"temporal_layers": 0}, [[1, 1, 1], [0, 0, 0]], [[0, 0, 0], [1, 1, 1]]),
        ({"cross_view_layers": 0}, [[0, 1, 0], [0, 1, 0]], [[0, 0, 0], [0, 1, 0]]),
        ({"cross_view_layers": 0, "temporal_layers": 0}, [[0, 1, 0], [0, 0, 0]], [[0, 0, 0], [0, 1, 0]]),
    ],
)
def test_a_view_sees_the_others_and_a_moment_those_before_it(
    layers: dict[str, int], of_the_first: list[list[int]], of_the_last: list[list[int]]
) -> None:
    """Which views of which moments a change of one view is seen by."""
    built = model(**layers)
    assert touched(built, moment=0, view=1).int().tolist() == of_the_first
    assert touched(built, moment=1, view=1).int().tolist() == of_the_last


@pytest.mark.parametrize("divisor", [5, 17, 300])
def test_every_fix_works(divisor: int) -> None:
    own, other = refusal(lambda: model_config({**TINY, "patch_size": divisor})).fix.split("; or ")
    model_config({**TINY, "patch_size": int(own.removeprefix("patch_size: "))})
    model_config({**TINY, "patch_size": divisor, "img_size": int(other.removeprefix("img_size: "))})
