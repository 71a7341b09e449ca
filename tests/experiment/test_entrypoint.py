"""An entrypoint is a trial or a script, whichever launcher of Determined is before it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds import Experiment
from tests.package import ENTRYPOINT, experiment, refusal

LAUNCH = "python3 -m determined.launch."
FORM = "python3 -m determined_ds.train"


def read(entrypoint: Any) -> Experiment:
    return experiment({"entrypoint": entrypoint})


@pytest.mark.parametrize(
    "entrypoint",
    [
        ENTRYPOINT,
        ENTRYPOINT.split(),
        ENTRYPOINT.replace("torch_distributed", "deepspeed"),
        "python3 -m determined.launch.deepspeed --trial x -- python3 -m determined_ds.train 'trial:Trial'",
        "python3 -m determined_ds.train trial:Trial",
    ],
)
def test_an_entrypoint_names_its_trial(entrypoint: Any) -> None:
    found = read(entrypoint)
    assert (found.trial, found.script, found.is_legacy) == ("trial:Trial", None, False)


def test_words_after_a_trial_are_options_of_train() -> None:
    assert read(f"{ENTRYPOINT} --more 1").train_options == ("--more", "1")
    assert read("python -m determined_ds.train a.b_2.é:T3").trial == "a.b_2.é:T3"


@pytest.mark.parametrize(
    "entrypoint",
    [
        "trial:Trial",
        f"{LAUNCH}deepspeed --trial trial:Trial",
        f"{LAUNCH}torch_distributed --max_restarts 2 -- --trial trial:Trial",
        "python3 -m determined.exec.harness trial:Trial",
    ],
)
def test_determineds_own_form_names_a_trial(entrypoint: Any) -> None:
    found = read(entrypoint)
    assert (found.trial, found.is_legacy) == ("trial:Trial", True)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("python3 train.py", ("train.py",)),
        (
            "/usr/bin/python3.11 -u -X dev src/train.py --lr 1e-3 -- a:B",
            ("src/train.py", "--lr", "1e-3", "--", "a:B"),
        ),
        ("python3 train.py 'a && b'", ("train.py", "a && b")),
        ("python3 -m package.module --a", ("-m", "package.module", "--a")),
        (f"{LAUNCH}torch_distributed --nnodes=1 -- python3 train.py --b", ("train.py", "--b")),
        (f"{LAUNCH}deepspeed python3 -m package", ("-m", "package")),
        (f"{LAUNCH}deepspeed python -m determined.launch.wrap_rank RANK -- python3 t.py", ("t.py",)),
    ],
)
def test_an_entrypoint_names_its_script(entrypoint: Any, words: tuple[str, ...]) -> None:
    script = read(entrypoint).script
    assert script is not None
    assert script.words == words


@pytest.mark.parametrize(
    ("entrypoint", "said", "fix"),
    [
        (None, "missing", FORM),
        ("python3 -m determined_ds.train trial.py", "'trial.py' is not MODULE:CLASS", FORM),
        (
            "python3 -m determined_ds.trian trial:Trial",
            "neither a trial nor a script",
            "did you mean determined_ds.train",
        ),
        (["trial:Trial"], "a list names a program", "trial:Trial"),
        ("A=1 python3 train.py", "runs 'A=1'", "environment.environment_variables"),
        ("pip install x && python3 train.py", "'&&', which only a shell", "startup-hook.sh"),
        ("torchrun --nproc_per_node 2 train.py", "starts ranks by torchrun", "slots_per_trial"),
        (f"{LAUNCH}deepspeed --trial trial:Trial --more", "--more' after --trial", "--trial model_def"),
        (
            f"{LAUNCH}torch_distributed --nnodes 1 python3 train.py",
            "'--nnodes' is not an option",
            "-- python3 train.py",
        ),
    ],
)
def test_any_other_entrypoint_is_refused_with_the_form(entrypoint: Any, said: str, fix: str) -> None:
    problem = refusal(lambda: read(entrypoint))
    assert said in problem.message
    assert fix in problem.fix
