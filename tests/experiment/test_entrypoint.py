"""An entrypoint is a trial or a script, whichever launcher of Determined is before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.package import ENTRYPOINT, experiment, refusal

LAUNCH = "python3 -m determined.launch."
FORM = "python3 -m determined_ds.train"


@pytest.mark.parametrize(
    ("entrypoint", "runs"),
    [
        (ENTRYPOINT, "trial:Trial"),
        (ENTRYPOINT.replace("torch_distributed", "deepspeed"), "trial:Trial"),
        (f"{LAUNCH}deepspeed --trial x -- python3 -m determined_ds.train 'trial:Trial'", "trial:Trial"),
        (f"{FORM} trial:Trial --pipeline-trial=a:B", "trial:Trial --pipeline-trial a:B"),
        # Determined's own forms
        ("trial:Trial", "legacy trial:Trial"),
        (f"{LAUNCH}deepspeed --trial trial:Trial", "legacy trial:Trial"),
        # Scripts
        ("/usr/bin/python3.11 -u -X dev src/train.py --lr 1 -- a:B", "script src/train.py --lr 1 -- a:B"),
        (f"{LAUNCH}torch_distributed --nnodes=1 -- python3 train.py --b", "script train.py --b"),
        (f"{LAUNCH}deepspeed python3 -m package", "script -m package"),
    ],
)
def test_an_entrypoint_names_its_trial_or_script(entrypoint: Any, runs: str) -> None:
    found = experiment({"entrypoint": entrypoint}).entrypoint
    kind = "script " if found.is_script else "legacy " if found.is_legacy else ""
    assert kind + " ".join(found.words) == runs


@pytest.mark.parametrize(
    ("entrypoint", "fix"),
    [
        (None, FORM),
        ("pip install x && python3 train.py", "startup-hook.sh"),
        ("torchrun --nproc_per_node 2 train.py", "slots_per_trial"),
        (f"{LAUNCH}torch_distributed --nnodes 1 python3 a.py", "-- python3"),
    ],
)
def test_any_other_entrypoint_is_refused_with_the_form(entrypoint: Any, fix: str) -> None:
    assert fix in refusal(lambda: experiment({"entrypoint": entrypoint})).fix
