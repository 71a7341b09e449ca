"""The functions by which a GPU is tested, here on a CPU: that they do what they say, on a model as small as can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds import load_experiment
from tests.gpu import one_card
from tests.harness.ranks import ROOT
from tests.package import resolved_of

SMALL = [
    "hyperparameters.model_size=tiny",
    "hyperparameters.vocab_size=256",
    "hyperparameters.sequence_length=32",
    "hyperparameters.global_batch_size=4",
    f"{one_card.OVERWRITE}.train_micro_batch_size_per_gpu=2",
    f"data.path={ROOT / 'LICENSE'}",
]
ON_A_CARD = {
    **{f"gpt2/{strategy}": [] for strategy in one_card.STRATEGIES},
    **{f"gpt2/zero1 {name}": sets for name, sets in one_card.PRECISION.items()},
    "gpt2/zero3_offload nvme": one_card.to_nvme(Path("/mnt")),
    **{
        f"gpt2/zero3_xl {size} {stage}": one_card.gpt2(size, stage, 8)
        for size in ("small", "xl")
        for stage in range(4)
    },
}


@pytest.mark.parametrize("case", ON_A_CARD)
def test_what_is_run_on_a_card_is_a_configuration_of_one(case: str) -> None:
    sets = [*one_card.length(10), *ON_A_CARD[case], "resources.slots_per_trial=1"]
    experiment = load_experiment(ROOT / "experiments" / f"{case.split()[0]}.yaml", sets)
    resolved = resolved_of(experiment)
    assert resolved.topology.slots == 1
    assert resolved.ds_config.get("fp16", {}).get("enabled", False) is ("fp16" in case)
    assert resolved.ds_config["bf16"]["enabled"] is ("fp16" not in case)


@pytest.mark.long("three programs, to try what is run on a GPU; test_resume has the kills")
def test_a_run_is_killed_and_resumed(tmp_path: Path) -> None:
    """On a CPU to the last bit."""
    killed, whole = one_card.losses_killed_and_not("gpt2/const", tmp_path, "cpu", SMALL)
    assert len(whole) == 12
    assert killed == whole


@pytest.mark.long("a program for a GPU, tried without one; memory/test_measured has the estimate")
def test_memory_is_set_beside_the_estimate_and_tokens_are_counted(tmp_path: Path) -> None:
    peak, estimated = one_card.peak_beside_estimate(tmp_path, "cpu", SMALL)
    assert min(peak, estimated) > 0  # of a process with torch in it, and of a GPU
    assert one_card.tokens_per_second(tmp_path / "run") > 0
