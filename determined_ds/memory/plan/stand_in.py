"""GPT-2 of ``model_defs``, which stands in for a model whose trial is not named."""

from __future__ import annotations

import math

GPT2 = "model_defs.gpt2.trial:GPT2Trial"
GPT2_PIPELINE = "model_defs.gpt2.trial:GPT2PipelineTrial"
GPT2_TRIALS = (GPT2, GPT2_PIPELINE)
# Parameters and attention heads of its sizes.
PARAMETERS = {"tiny": 843e3, "small": 124e6, "medium": 355e6, "large": 774e6, "xl": 1558e6}
HEADS = {"tiny": 4, "small": 12, "medium": 16, "large": 20, "xl": 25}
ALIKE = 1.15  # as a ratio of sizes


def nearest_size(parameters: int) -> str:
    """The size of GPT-2 that is nearest to a number of parameters."""
    return min(PARAMETERS, key=lambda size: abs(math.log(PARAMETERS[size] / parameters)))


def is_alike(parameters: int) -> bool:
    """Whether a GPT-2 has about so many parameters."""
    return 1 / ALIKE <= parameters / PARAMETERS[nearest_size(parameters)] <= ALIKE
