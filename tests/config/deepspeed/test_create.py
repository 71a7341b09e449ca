"""DeepSpeed configurations made from Python, and their files: nothing that DeepSpeed would not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import (
    create_deepspeed_config,
    load_deepspeed_config,
    save_deepspeed_config,
)
from tests.package import DS_CONFIGS, refusal

BOTH = {"contiguous_gradients": True, "overlap_comm": True}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
TEMPLATES: dict[str, dict[str, Any]] = {
    "pipeline": {"zero_stage": 0},
    "pipeline_zero1": {"zero_stage": 1},
    "tensor_parallel": {"zero_stage": 1, "sections": {"tensor_parallel": {"autotp_size": "auto"}}},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2, **BOTH},
    "zero3": {"zero_stage": 3, **BOTH, **GATHER},
    "zero3_offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **GATHER},
    "zeropp": {
        "zero_stage": 3,
        "zero_hpz_partition_size": 2,
        "zero_quantized_weights": True,
        "zero_quantized_gradients": True,
        **BOTH,
    },
}


def made(**arguments: Any) -> dict[str, Any]:
    """Arguments of a wrong type too, which a type checker would refuse."""
    return create_deepspeed_config(**{"zero_stage": 1, **arguments})


# ------------------------------------------------------------------------------------------------------ creating


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_template_can_be_made_and_is_loaded_and_saved_as_it_is(path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "new" / "folder" / "ds.json"
    made_here = made(**TEMPLATES[path.stem]) if path.stem in TEMPLATES else load_deepspeed_config(path)
    save_deepspeed_config(made_here, saved)
    assert saved.read_text() == path.read_text()
    save_deepspeed_config(load_deepspeed_config(path), saved, overwrite=True)
    assert saved.read_bytes() == path.read_bytes()
    assert [file.name for file in saved.parent.iterdir()] == ["ds.json"]


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ({"precision": "bf16"}, "bf16.enabled", True),
        ({"learning_rate": 0.1}, "optimizer.params.lr", 0.1),
        ({"lr": 0.1}, "scheduler.params.warmup_max_lr", 0.1),
        ({"optimizer": "Lion"}, "optimizer.params", {"lr": "auto", "betas": "auto", "weight_decay": "auto"}),
        ({"scheduler": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "auto"),
        ({"reduce_bucket_size": 5e8}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"sections": {"zero_optimization": {"reduce_scatter": False}}}, "zero_optimization.stage", 1),
    ],
)
def test_an_argument_is_written_where_deepspeed_reads_it(
    arguments: dict[str, Any], path: str, value: Any
) -> None:
    found: Any = made(**arguments)
    for key in path.split("."):
        found = found[key]
    assert found == value


@pytest.mark.parametrize(
    ("arguments", "key", "said", "fix"),
    [
        ({"zero_stage": 5}, "zero_optimization.stage", "not one of the allowed values", "0, 1, 2, 3"),
        ({"precision": "bf61"}, "precision", "no such precision", "did you mean bf16?"),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param", "ZeRO stage 3, not 1", "to 3"),
        (
            {"offload_optimizer": True},
            "zero_optimization.offload_optimizer",
            "a mapping",
            '{"device": "cpu"}',
        ),
        ({"learning_rte": 0.1}, "learning_rte", "unknown key", "'learning_rate'"),
        ({"optimizer": "AdmW"}, "optimizer.type", "no such optimizer", "did you mean AdamW?"),
        ({"optimizer": "Lion", "eps": 1e-8}, "optimizer.params.eps", "unknown key", "betas"),
        ({"sections": {"steps_per_prnt": 1}}, "steps_per_prnt", "unknown key", "'steps_per_print'"),
        ({"train_batch_size": 8, "micro_batch_size": 3}, "train_batch_size", "not a multiple of", "6 or 9"),
        ({"stage": 2}, "stage", "another name of zero_stage, which is 1", "keep zero_stage only"),
        ({"learning_rate": 0.1, "optimizer_params": {"lr": 0.5}}, "optimizer.params.lr", "not used", "auto"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: dict[str, Any], key: str, said: str, fix: str) -> None:
    found = refusal(lambda: made(**arguments))
    assert found.key == key
    assert said in found.message
    assert fix in found.fix


# --------------------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"trian_batch_size": 8}, "unknown key"),
        ({"steps_per_print": {3}}, "set is not JSON"),
        ({"gradient_clipping": math.nan}, "not JSON compliant"),
        ([1], "must be a mapping"),
    ],
)
def test_what_deepspeed_would_not_read_is_not_saved(config: Any, said: str, tmp_path: Path) -> None:
    found = refusal(lambda: save_deepspeed_config(config, tmp_path / "ds.json"))
    assert said in found.message
    assert list(tmp_path.iterdir()) == []


def test_no_file_is_replaced_without_permission(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("mine")
    path.chmod(0o640)
    found = refusal(lambda: save_deepspeed_config(made(), path))
    assert (found.origin, found.message) == (str(path), "is there already")
    assert "overwrite=True" in found.fix
    assert path.read_text() == "mine"
    save_deepspeed_config(made(), path, overwrite=True)
    assert load_deepspeed_config(path) == made()
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_leaves_a_file_as_it_was(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(64 * 1024) / "ds.json"
    save_deepspeed_config(made(), path)
    found = refusal(lambda: save_deepspeed_config({"_comment": "x" * 2**18, **made()}, path, overwrite=True))
    assert "No space left" in found.message
    assert load_deepspeed_config(path) == made()
    assert list(path.parent.iterdir()) == [path]
