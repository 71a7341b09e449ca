"""DeepSpeed configurations made from Python, and their files: nothing that DeepSpeed would not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import create_deepspeed_config, create_offload_config
from determined_ds import load_deepspeed_config as load
from determined_ds import save_deepspeed_config as save
from tests.config.deciding import nested
from tests.package import DS_CONFIGS, refusal

Json = dict[str, Any]
OVERLAP = {"contiguous_gradients": True, "overlap_comm": True}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
PLUS_PLUS = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
TEMPLATES: dict[str, Json] = {
    "pipeline": {"zero_stage": 0},
    "pipeline_zero1": {"zero_stage": 1},
    "tensor_parallel": {"zero_stage": 1, "sections": {"tensor_parallel": {"autotp_size": "auto"}}},
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2, **OVERLAP},
    "zero3": {"zero_stage": 3, **OVERLAP, **GATHER},
    "zero3_offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **GATHER},
    "zeropp": {"zero_stage": 3, **PLUS_PLUS, **OVERLAP},
}


def made(**arguments: Any) -> Json:
    """Arguments of a wrong type too, which a type checker would refuse."""
    return create_deepspeed_config(**{"zero_stage": 1, **arguments})


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_template_can_be_made_and_is_loaded_and_saved_as_it_is(path: Path, tmp_path: Path) -> None:
    for name in TEMPLATES.keys() & {path.stem}:
        save(made(**TEMPLATES[name]), tmp_path / "made.json")
        assert (tmp_path / "made.json").read_bytes() == path.read_bytes()
    saved = tmp_path / "new" / "folder" / "ds.json"
    save(load(path), saved)
    assert saved.read_bytes() == path.read_bytes()


NVME = create_offload_config("nvme", nvme_path="/nvme", buffer_count=4)


@pytest.mark.parametrize(
    ("arguments", "key", "value"),
    [
        ({"precision": "bf16"}, "bf16.enabled", True),
        ({"learning_rate": 0.1}, "optimizer.params.lr", 0.1),
        ({"learning_rate": 0.1}, "scheduler.params.warmup_max_lr", 0.1),
        ({"optimizer": "Lion"}, "optimizer.params", {"lr": "auto", "betas": "auto", "weight_decay": "auto"}),
        ({"scheduler": "WarmupDecayLR"}, "scheduler.params.total_num_steps", "auto"),
        ({"lr": 0.1}, "optimizer.params.lr", 0.1),
        ({"reduce_bucket_size": 5e8}, "zero_optimization.reduce_bucket_size", 500_000_000),
        ({"sections": nested("zero_optimization.reduce_scatter", False)}, "zero_optimization.stage", 1),
        ({"zero_stage": 3, "offload_param": NVME}, "zero_optimization.offload_param.pin_memory", "auto"),
    ],
)
def test_an_argument_is_written_where_deepspeed_reads_it(arguments: Json, key: str, value: Any) -> None:
    found: Any = made(**arguments)
    for step in key.split("."):
        found = found[step]
    assert found == value


@pytest.mark.parametrize(
    ("arguments", "key", "said", "fix"),
    [
        ({"zero_stage": 5}, "zero_optimization.stage", "not one of", "0, 1, 2, 3"),
        ({"precision": "bf61"}, "precision", "no such precision", "did you mean bf16?"),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param", "ZeRO stage 3, not 1", "to 3"),
        (
            {"offload_optimizer": True},
            "zero_optimization.offload_optimizer",
            "a mapping",
            '{"device": "cpu"}',
        ),
        ({"learning_rte": 0.1}, "learning_rte", "unknown key", "'learning_rate'"),
        ({"stage": 2}, "stage", "another name of zero_stage, which is 1", "keep zero_stage only"),
        ({"optimizer": "AdmW"}, "optimizer.type", "no such optimizer", "did you mean AdamW?"),
        ({"optimizer": "Lion", "eps": 1e-8}, "optimizer.params.eps", "unknown key", "betas"),
        ({"sections": {"steps_per_prnt": 1}}, "steps_per_prnt", "unknown key", "'steps_per_print'"),
        ({"train_batch_size": 8, "micro_batch_size": 3}, "train_batch_size", "not a multiple of", "6 or 9"),
        ({"learning_rate": 0.1, "optimizer_params": {"lr": 0.5}}, "optimizer.params.lr", "not used", "auto"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: Json, key: str, said: str, fix: str) -> None:
    found = refusal(lambda: made(**arguments))
    assert found.key == key
    assert said in found.message
    assert fix in found.fix


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
    assert said in refusal(lambda: save(config, tmp_path / "ds.json")).message
    assert list(tmp_path.iterdir()) == []


def test_a_file_is_replaced_whole_and_by_permission_alone(small_disk: Callable[[int], Path]) -> None:
    path = small_disk(64 * 1024) / "ds.json"
    path.write_text("mine")
    path.chmod(0o640)
    found = refusal(lambda: save(made(), path))
    assert (found.origin, found.message) == (str(path), "is there already")
    assert "overwrite=True" in found.fix
    assert path.read_text() == "mine"
    save(made(), path, overwrite=True)
    found = refusal(lambda: save({"_comment": "x" * 2**18, **made()}, path, overwrite=True))
    assert "No space left" in found.message
    assert load(path) == made()
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]
