"""The Fréchet distance between two sets of images, as the model's measure at validation.

Legend of shape suffixes: B images, C colours, H height and W width, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from determined.pytorch import MetricReducer
from torch import Tensor
from torch.nn import functional

GRID = 8  # features are the image's colours on a grid of so many cells a side


def features(images_BCHW: Tensor) -> Tensor:
    """features_BF: an image's colours, averaged over the cells of a grid; of 8 x 8 digits, their pixels."""
    return functional.adaptive_avg_pool2d(images_BCHW.float(), GRID).flatten(1).double()


class FrechetDistance(MetricReducer):
    """How far generated images are from real ones, as two normal distributions of their features.

    |mean difference|² + trace(C1 + C2 - 2 (C1 C2)^1/2), of pixels in [-1, 1]; 0 where both distributions agree.
    Sums of features and of their products are added up over samples and ranks, and only then divided.

    Source of the measure: Dowson and Landau, 1982; on Inception's features it is the FID of arXiv 1706.08500.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.real: Tensor | None = None
        self.generated: Tensor | None = None

    def update(self, real_BCHW: Tensor, generated_BCHW: Tensor) -> None:
        """Count the images of a batch."""
        self.real = _added(self.real, real_BCHW)
        self.generated = _added(self.generated, generated_BCHW)

    def per_slot_reduce(self) -> tuple[Tensor | None, Tensor | None]:
        return (
            None if self.real is None else self.real.cpu(),
            None if self.generated is None else self.generated.cpu(),
        )

    def cross_slot_reduce(self, per_slot_metrics: list[Any]) -> float:
        real, generated = (
            sum(sums for sums in of_slots if sums is not None)
            for of_slots in zip(*per_slot_metrics, strict=True)
        )
        return frechet_distance(_moments(real), _moments(generated))


def _added(sums: Tensor | None, images_BCHW: Tensor) -> Tensor:
    """Number, sum and sum of products of features, in one matrix: that of (1, features) with itself."""
    values_BF = features(images_BCHW)
    with_one = torch.cat([torch.ones_like(values_BF[:, :1]), values_BF], dim=1)
    products = with_one.T @ with_one
    return products if sums is None else sums + products


def _moments(sums: Any) -> tuple[Tensor, Tensor]:
    number = sums[0, 0]
    mean_F = sums[0, 1:] / number
    return mean_F, sums[1:, 1:] / number - torch.outer(mean_F, mean_F)


def frechet_distance(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    """Between two normal distributions, each a mean_F and a covariance_FF in float64."""
    (mean_F, covariance_FF), (other_mean_F, other_covariance_FF) = one, other
    root = _root(covariance_FF)
    # The eigenvalues of C1 C2 are those of this symmetric matrix.
    eigenvalues = torch.linalg.eigvalsh(root @ other_covariance_FF @ root).clamp(min=0)
    apart = (mean_F - other_mean_F).square().sum()
    spread = covariance_FF.trace() + other_covariance_FF.trace() - 2 * eigenvalues.sqrt().sum()
    return float(apart + spread)


def _root(symmetric: Tensor) -> Tensor:
    eigenvalues, vectors = torch.linalg.eigh(symmetric)
    return (vectors * eigenvalues.clamp(min=0).sqrt()) @ vectors.T
