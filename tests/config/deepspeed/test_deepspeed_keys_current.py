"""`deepspeed_keys.json` is what the generator beside this file writes for the installed DeepSpeed."""

import subprocess
import sys
from pathlib import Path

from tests.config.deciding import KEYS

GENERATOR = Path(__file__).with_name("generate_deepspeed_keys.py")


def test_deepspeed_keys_are_those_of_the_installed_deepspeed(tmp_path: Path) -> None:
    """In a process of its own: the generator fixes DeepSpeed's accelerator before it imports DeepSpeed."""
    fresh = tmp_path / KEYS.name
    subprocess.run([sys.executable, GENERATOR, fresh], check=True, timeout=300)
    assert KEYS.read_text() == fresh.read_text(), f"Run {GENERATOR.name}, and commit the result."
