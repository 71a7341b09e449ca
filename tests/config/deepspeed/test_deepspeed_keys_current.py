"""`deepspeed_keys.json` is what the generator beside this file writes for the installed DeepSpeed."""

import subprocess
import sys
from pathlib import Path

import pytest

GENERATOR = Path(__file__).with_name("generate_deepspeed_keys.py")
DATA = Path(__file__).parents[3] / "determined_ds" / "config" / "deepspeed_keys.json"


def test_deepspeed_keys_are_those_of_the_installed_deepspeed(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    fresh = tmp_path / DATA.name
    # In a process of its own: the generator fixes DeepSpeed's accelerator before it imports DeepSpeed.
    done = subprocess.run([sys.executable, GENERATOR, fresh], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    fix = f"Run `python tests/config/deepspeed/{GENERATOR.name}` and commit the result."
    assert DATA.read_text(encoding="utf-8") == fresh.read_text(encoding="utf-8"), fix
