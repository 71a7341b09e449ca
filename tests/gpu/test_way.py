"""The functions by which a GPU is tested, here on a CPU: that they do what they say, on a model as small as can be."""

from __future__ import annotations

from pathlib import Path

import pytest

from determined_ds.config.resolve import Where
from determined_ds.experiment.decide import decide, read_document
from determined_ds.experiment.experiment import parse_experiment
from tests.gpu import one_card
from tests.making import CUDA
from tests.ranks import ROOT

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
    sets = [*one_card.length(10), *ON_A_CARD[case]]
    path = ROOT / "experiments" / f"{case.split()[0]}.yaml"
    experiment = parse_experiment(read_document(path, ROOT, slots=1, overrides=sets))
    resolved = decide(
        experiment, experiment.hyperparameters, Where(context_dir=ROOT, accelerator=CUDA), here=True
    )
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


@pytest.mark.parametrize(
    ("card", "peak"),
    [
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A10G", 70e12),
        ("NVIDIA L40S", 362e12),
        ("A card of tomorrow", None),
    ],
)
def test_a_card_is_known_by_its_name(card: str, peak: float | None) -> None:
    assert one_card.peak_flops(card) == peak


def test_the_work_of_a_token() -> None:
    """GPT-2 small at 1024 tokens, by hand: 6 x 123.7 million, and 12 x 12 x 768 x 1024."""
    assert one_card.flops_per_token(123_653_376, 12, 768, 1024) == pytest.approx(855e6, rel=0.001)
