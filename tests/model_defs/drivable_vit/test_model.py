"""The drivable-space transformer: what attends to what, its size, its start, and what it refuses."""

from __future__ import annotations

import pytest
import torch

from determined_ds.errors import ConfigError
from model_defs.drivable_vit.iou import IoU
from model_defs.drivable_vit.model import DrivableViT, DrivableViTConfig, mask_loss, model_config

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


def test_full_size_parameters() -> None:
    with torch.device("meta"):
        built = DrivableViT(DrivableViTConfig())
    blocks = sum(p.numel() for name, p in built.named_parameters() if name.split(".")[1].isdigit())
    # Twelve blocks of a ViT-Base.
    assert blocks == 12 * 7_087_872
    assert 85e6 < sum(p.numel() for p in built.parameters()) < 90e6


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"cross_view_layers": 0, "temporal_layers": 0}, [[0, 0, 0], [0, 1, 0]]),
        ({"temporal_layers": 0}, [[0, 0, 0], [1, 1, 1]]),
        ({"cross_view_layers": 0}, [[0, 0, 0], [0, 1, 0]]),
        ({}, [[0, 0, 0], [1, 1, 1]]),
    ],
)
def test_the_last_moment_is_seen_by_itself_alone(layers: dict[str, int], expected: list[list[int]]) -> None:
    assert touched(model(**layers), moment=1, view=1).int().tolist() == expected


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        ({"temporal_layers": 0}, [[1, 1, 1], [0, 0, 0]]),
        ({"cross_view_layers": 0}, [[0, 1, 0], [0, 1, 0]]),
        ({}, [[1, 1, 1], [1, 1, 1]]),
    ],
)
def test_an_earlier_moment_is_seen_later(layers: dict[str, int], expected: list[list[int]]) -> None:
    assert touched(model(**layers), moment=0, view=1).int().tolist() == expected


@torch.no_grad()
def test_fewer_moments_are_the_last_ones() -> None:
    """A rig that has just started: the present moment alone has the place of the present."""
    alone = model(cross_view_layers=0)
    assert alone(pixels()[:, 1:]).shape == (1, 1, 3, 16, 16)
    places = alone.positions.moment_MD
    places.zero_()
    places[-1] = 1.0
    hidden = torch.zeros(1, 1, 3, 16, 16)
    assert torch.equal(
        alone.positions(hidden)[0, 0, 0, 0], alone.positions.patch_ND[0] + alone.positions.view_VD[0] + 1
    )


def test_patches_lie_where_their_pixels_are() -> None:
    """Each pixel's decoder features come from the patch that holds it."""
    built = model(spatial_layers=0, cross_view_layers=0, temporal_layers=0)
    one = pixels().requires_grad_()
    built(one)[0, 0, 0, 9, 5].backward()
    rows, columns = one.grad[0, 0, 0].abs().sum(0).nonzero().unbind(1)  # type: ignore[index]
    # Two convolutions reach two pixels further; those pixels' patches are rows 4..12, columns 0..8.
    assert (rows.min(), rows.max(), columns.min(), columns.max()) == (4, 11, 0, 7)


def test_weights_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(1)
    first = DrivableViT(model_config(TINY), seed=3).state_dict()
    torch.manual_seed(2)
    again = DrivableViT(model_config({**TINY, "spatial_layers": 2}), seed=3).state_dict()
    other = DrivableViT(model_config(TINY), seed=4).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in first.items())
    assert not torch.equal(first["patches.project.weight"], other["patches.project.weight"])


def test_loss_is_that_of_pixels() -> None:
    logits = torch.tensor([[[[[0.0, 0.0]]]]])
    assert mask_loss(logits, torch.tensor([[[[[0, 1]]]]], dtype=torch.uint8)).item() == pytest.approx(
        0.693147
    )


def test_iou_is_a_ratio_of_sums() -> None:
    """A slot with no union changes nothing, and a large image counts for more than a small one."""
    first, second, idle = IoU(), IoU(), IoU()
    first.update(torch.tensor([True, True, False]), torch.tensor([True, False, False]))  # 1 of 2
    second.update(torch.ones(6).bool(), torch.ones(6).bool())  # 6 of 6
    slots = [each.per_slot_reduce() for each in (first, second, idle)]
    assert first.cross_slot_reduce(slots) == 7 / 8
    assert first.cross_slot_reduce([idle.per_slot_reduce()]) == 1.0
    first.reset()
    assert first.per_slot_reduce() == [0, 0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"patch_size": 5},
            ["patch_size = 5", "does not divide img_size 16", "4 or 8", "img_size: 15 or 20"],
        ),
        ({"num_heads": 3}, ["num_heads = 3", "does not divide embed_dim 16", "2 or 4"]),
        ({"embed_dim": 0, "num_heads": "two"}, ["embed_dim = 0", "num_heads = 'two'", "num_heads: 12"]),
        ({"patch_size": 5, "num_heads": 3}, ["patch_size = 5", "num_heads = 3"]),
    ],
)
def test_sizes_that_do_not_fit(changes: dict[str, object], said: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config({**TINY, **changes, "learning_rate": 0.1})
    for words in said:
        assert words in str(caught.value)


@pytest.mark.parametrize("divisor", [5, 17, 300])
def test_every_fix_works(divisor: int) -> None:
    with pytest.raises(ConfigError) as caught:
        model_config({**TINY, "patch_size": divisor})
    own, other = caught.value.problems[0].fix.split("; or ")
    for patch_size in own.removeprefix("patch_size: ").split(" or "):
        model_config({**TINY, "patch_size": int(patch_size)})
    for img_size in other.removeprefix("img_size: ").split(" or "):
        model_config({**TINY, "patch_size": divisor, "img_size": int(img_size)})
