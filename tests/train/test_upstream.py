"""How Determined, DeepSpeed and torch are loaded in a rank: without a word, and without a code generator."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.harness.command import ROOT

START = """
import logging, sys
from determined_ds import open_context
hparams = {"global_batch_size": 8, "deepspeed_config": {}}
with open_context(hparams=hparams, accelerator="cpu"):
    from deepspeed.runtime.zero.muon import muon_optimizer, original_muon
    assert not {"torch._inductor.compile_fx", "torch._dynamo.config", "mlflow"} & set(sys.modules)
    assert not hasattr(original_muon.muon_update, "__wrapped__")  # on a CPU it is not compiled
    logging.getLogger("determined_ds").warning("the last")
"""


def test_a_rank_that_has_started_has_loaded_no_code_generator_and_said_nothing() -> None:
    """DeepSpeed warns where nobody says what to compute on, and it finds no GPU."""
    words = [sys.executable, "-c", START]
    environment = {name: value for name, value in os.environ.items() if name != "DS_ACCELERATOR"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "the last" in done.stderr
    assert "WARNING" not in done.stdout + done.stderr.replace("WARNING: the last", "")
