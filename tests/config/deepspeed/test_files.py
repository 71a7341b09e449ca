"""Files of DeepSpeed configurations: saved as they were loaded, and nothing that DeepSpeed would not read."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from determined_ds import create_deepspeed_config, load_deepspeed_config, save_deepspeed_config
from determined_ds.config.deepspeed.files import deepspeed_config_text
from tests.making import DS_CONFIGS, ROOT, refusal, refusals

CONFIG = create_deepspeed_config(zero_stage=1)


@pytest.mark.parametrize("path", DS_CONFIGS, ids=lambda path: path.stem)
def test_what_is_loaded_is_saved_as_it_was(path: Path, tmp_path: Path) -> None:
    saved = tmp_path / "new" / "folder" / "ds.json"
    save_deepspeed_config(load_deepspeed_config(path), saved)
    assert saved.read_bytes() == path.read_bytes()
    assert [file.name for file in saved.parent.iterdir()] == ["ds.json"]


def test_the_order_of_the_keys_is_the_templates(tmp_path: Path) -> None:
    config = load_deepspeed_config(ROOT / "experiments" / "deepspeed" / "zero1.json")
    backwards = {"steps_per_print": 10, **dict(reversed(config.items()))}
    assert list(json.loads(deepspeed_config_text(backwards))) == [*config, "steps_per_print"]


def test_loading_tells_all_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{\n"trian_batch_size": 8,\n"zero_optimization": {"stage": "1"}\n}')
    found = refusals(lambda: load_deepspeed_config(path))
    assert [problem.origin for problem in found] == [f"{path}:2", f"{path}:3"]
    assert found[0].fix == "did you mean 'train_batch_size'?"
    assert refusal(lambda: load_deepspeed_config(tmp_path / "no.json")).message == "no such file"


def test_loading_gives_the_form_that_is_run(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text('{"zero_optimization": true, "train_batch_size": 8.0}')
    assert load_deepspeed_config(str(path)) == {"zero_optimization": {"stage": 1}, "train_batch_size": 8}


@pytest.mark.parametrize(
    ("config", "said", "fix"),
    [
        ({"trian_batch_size": 8}, "unknown key", "did you mean 'train_batch_size'?"),
        ({"stage": 1}, "unknown key", "did you mean zero_optimization.stage?"),
        ({"steps_per_print": {3}}, "no form for a set", "write"),
        ({"gradient_clipping": math.nan}, "finite numbers only", "finite"),
        ({3: 4}, "a key of JSON must be a string, not 3", "string"),
        ({"zero_optimization": {"stage": 9}}, "not one of the values", "0, 1, 2, 3"),
    ],
)
def test_what_deepspeed_would_not_read_is_not_saved(
    config: dict[str, Any], said: str, fix: str, tmp_path: Path
) -> None:
    found = refusal(lambda: save_deepspeed_config(config, tmp_path / "ds.json"))
    assert said in found.message
    assert fix in found.fix
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("config", ["ds.json", [1], None, 3])
def test_what_is_no_mapping_is_not_saved(config: Any, tmp_path: Path) -> None:
    """The arguments swapped, most often."""
    found = refusal(
        lambda: save_deepspeed_config(config, {} if config == "ds.json" else tmp_path / "ds.json")
    )  # type: ignore[arg-type]
    assert "must be a mapping" in found.message
    assert "the configuration comes first" in found.fix
    assert list(tmp_path.iterdir()) == []


def test_a_mapping_that_holds_itself_is_not_saved(tmp_path: Path) -> None:
    config: dict[str, Any] = {}
    config["bf16"] = config
    assert "holds itself" in refusal(lambda: save_deepspeed_config(config, tmp_path / "ds.json")).message


def test_nothing_is_replaced_unless_it_is_said(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text("mine")
    path.chmod(0o640)
    found = refusal(lambda: save_deepspeed_config(CONFIG, path))
    assert (found.origin, found.message) == (str(path), "is there already")
    assert "overwrite=True" in found.fix
    assert path.read_text() == "mine"
    save_deepspeed_config(CONFIG, path, overwrite=True)
    assert load_deepspeed_config(path) == CONFIG
    assert path.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("name", ["", "file/ds.json", "folder", "a" * 300, "a\0b"])
def test_what_cannot_be_written_is_told(name: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for overwrite in (False, True):
        found = refusal(lambda: save_deepspeed_config(CONFIG, tmp_path / name, overwrite=overwrite))  # noqa: B023
        assert found.origin
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]
