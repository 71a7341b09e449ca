"""An entrypoint is a trial or a script, whichever launcher of Determined is before it."""

from __future__ import annotations

from typing import Any

import pytest

from tests.package import ENTRYPOINT, experiment, refusal

LAUNCH = "python3 -m determined.launch."
FORM = "python3 -m determined_ds.train"
SCRIPT = "python3 train.py"


@pytest.mark.parametrize(
    ("entrypoint", "options", "is_legacy"),
    [
        (ENTRYPOINT, (), False),
        (ENTRYPOINT.split(), (), False),
        (ENTRYPOINT.replace("torch_distributed", "deepspeed"), (), False),
        (f"{LAUNCH}deepspeed --trial x -- python3 -m determined_ds.train 'trial:Trial'", (), False),
        ("python -m determined_ds.train trial:Trial --more $N", ("--more", "$N"), False),
        (
            "python3 -m determined_ds.train trial:Trial --pipeline-trial=a:B",
            ("--pipeline-trial", "a:B"),
            False,
        ),
        # Determined's own forms
        ("trial:Trial", (), True),
        (f"{LAUNCH}deepspeed --trial trial:Trial", (), True),
        (f"{LAUNCH}torch_distributed --max_restarts 2 -- --trial=trial:Trial", (), True),
    ],
)
def test_an_entrypoint_names_its_trial(entrypoint: Any, options: tuple[str, ...], is_legacy: bool) -> None:
    found = experiment({"entrypoint": entrypoint})
    assert (found.trial, found.script) == ("trial:Trial", None)
    assert (found.entrypoint.options, found.entrypoint.is_legacy) == (options, is_legacy)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("/usr/bin/python3.11 -u -X dev src/train.py --lr 1 -- a:B", "src/train.py --lr 1 -- a:B"),
        ("python3 train.py 'a && b'", "train.py a && b"),
        ("python3 -m package.module --a", "-m package.module --a"),
        (f"{LAUNCH}torch_distributed --nnodes=1 -- python3 train.py --b", "train.py --b"),
        (f"{LAUNCH}deepspeed python3 -m package", "-m package"),
    ],
)
def test_an_entrypoint_names_its_script(entrypoint: str, words: str) -> None:
    script = experiment({"entrypoint": entrypoint}).script
    assert script is not None
    assert " ".join(script.words) == words


@pytest.mark.parametrize(
    ("entrypoint", "said", "fix"),
    [
        (None, "missing", FORM),
        ("python3 -m determined_ds.train trial.py", "'trial.py' is not MODULE:CLASS", FORM),
        ("python3 -m determined_ds.trian a:B", "neither a trial nor", FORM),
        (["trial:Trial"], "runs 'trial:Trial'", SCRIPT),
        ("A=1 python3 train.py", "runs 'A=1'", "environment.environment_variables"),
        ("pip install x && python3 train.py", "'&&', which only a shell", "startup-hook.sh"),
        ("torchrun --nproc_per_node 2 train.py", "runs 'torchrun'", "slots_per_trial"),
        ("python3 -m torch.distributed.run train.py", "runs 'torch.distributed.run'", "slots_per_trial"),
        ("python3 -m", "names no file or module", FORM),
        (f"{LAUNCH}deepspeed --trial trial:Trial --more", "--more' after --trial", "--trial model_def"),
        (f"{LAUNCH}torch_distributed --nnodes 1 python3 a.py", "'--nnodes' is not an option", "-- python3"),
    ],
)
def test_any_other_entrypoint_is_refused_with_the_form(entrypoint: Any, said: str, fix: str) -> None:
    problem = refusal(lambda: experiment({"entrypoint": entrypoint}))
    assert said in problem.message
    assert fix in problem.fix
