"""DeepSpeed configurations made from Python, and their files: nothing that DeepSpeed would not read."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from determined_ds import create_deepspeed_config
from determined_ds import load_deepspeed_config as load
from determined_ds import save_deepspeed_config as save
from tests.config.deciding import Json, zero
from tests.package import DS_CONFIGS, refusal

OVERLAP = {"contiguous_gradients": True, "overlap_comm": True}
GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
PLUS_PLUS = {"zero_hpz_partition_size": 2, "zero_quantized_weights": True, "zero_quantized_gradients": True}
TEMPLATES: dict[str, Json] = {
    "pipeline": {"zero_stage": 0},
    "tensor_parallel": {"zero_stage": 1, "sections": {"tensor_parallel": {"autotp_size": "auto"}}},
    "zero1": {"zero_stage": 1},
    "zero3_offload": {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu", **GATHER},
    "zeropp": {"zero_stage": 3, **PLUS_PLUS, **OVERLAP},
}


def made(**arguments: Any) -> Json:
    """Arguments of a wrong type too, which a type checker would refuse."""
    return create_deepspeed_config(**{"zero_stage": 1, **arguments})


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_every_template_can_be_made_and_is_loaded_and_saved_as_it_is(path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "new" / "folder" / "ds.json"
    configs = [load(path), *(made(**TEMPLATES[name]) for name in TEMPLATES.keys() & {path.stem})]
    for config in configs:
        save(config, saved, overwrite=True)
        assert saved.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("arguments", "key", "fix"),
    [
        ({"precision": "bf61"}, "precision", "did you mean bf16?"),
        ({"learning_rte": 0.1}, "learning_rte", "'learning_rate'"),
        ({"stage": 2}, "stage", "keep zero_stage only"),
        ({"train_batch_size": 8, "micro_batch_size": 3}, "train_batch_size", "6 or 9"),
        # ---- by the schema and the rules of every run
        ({"optimizer": "Lion", "eps": 1e-8}, "optimizer.params.eps", "betas"),
        ({"offload_param": "cpu"}, "zero_optimization.offload_param", "to 3"),
    ],
)
def test_a_wrong_argument_is_refused(arguments: Json, key: str, fix: str) -> None:
    found = refusal(lambda: made(**arguments))
    assert found.key == key
    assert fix in found.fix


def test_a_file_is_replaced_whole_by_permission_and_by_what_deepspeed_reads(
    small_disk: Callable[[int], Path],
) -> None:
    path = small_disk(64 * 1024) / "ds.json"
    for config in ({"trian_batch_size": 8}, {"steps_per_print": {3}}, {"gradient_clipping": math.nan}, [1]):
        refusal(lambda config=config: save(config, path))
    assert not path.exists()
    path.write_text("mine")
    path.chmod(0o640)
    assert "overwrite=True" in refusal(lambda: save(zero(1), path)).fix
    assert path.read_text() == "mine"
    save(zero(1), path, overwrite=True)
    refusal(lambda: save({"_comment": "x" * 2**18}, path, overwrite=True))  # no space is left for it
    assert load(path) == zero(1)
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(path.parent.iterdir()) == [path]
