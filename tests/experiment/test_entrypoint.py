"""An entrypoint is a trial or a script, whichever launcher of Determined is before it."""

from __future__ import annotations

from typing import Any

import pytest

from determined_ds.errors import EntrypointError
from determined_ds.experiment.entrypoint import (
    ENTRYPOINT_FORM,
    ScriptEntrypoint,
    TrialEntrypoint,
    read_entrypoint,
)
from tests.making import ENTRYPOINT

LAUNCH = "python3 -m determined.launch."


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
    assert read_entrypoint(entrypoint) == TrialEntrypoint(trial="trial:Trial")


def test_words_after_a_trial_are_options_of_train() -> None:
    assert read_entrypoint(f"{ENTRYPOINT} --more 1").words == ("trial:Trial", "--more", "1")
    assert str(read_entrypoint("python -m determined_ds.train a.b_2.é:T3")) == "a.b_2.é:T3"


@pytest.mark.parametrize(
    "entrypoint",
    [
        "trial:Trial",
        f"{LAUNCH}deepspeed --trial trial:Trial",
        f"{LAUNCH}deepspeed --trial=trial:Trial".split(),
        f"{LAUNCH}torch_distributed --trial trial:Trial",
        f"{LAUNCH}torch_distributed --max_restarts 2 -- --trial trial:Trial",
        "python3 -m determined.exec.harness trial:Trial",
    ],
)
def test_determineds_own_form_names_a_trial(entrypoint: Any) -> None:
    assert read_entrypoint(entrypoint) == TrialEntrypoint(trial="trial:Trial", legacy=True)


@pytest.mark.parametrize(
    ("entrypoint", "words"),
    [
        ("python3 train.py", ("train.py",)),
        (
            "/usr/bin/python3.11 -u -X dev src/train.py --lr 1e-3 -- a:B",
            ("src/train.py", "--lr", "1e-3", "--", "a:B"),
        ),
        (["python3", "train.py", "a && b", "$c"], ("train.py", "a && b", "$c")),
        ("python3 train.py 'a && b'", ("train.py", "a && b")),
        ("python3 -m package.module --a", ("-m", "package.module", "--a")),
        (f"{LAUNCH}torch_distributed python3 train.py", ("train.py",)),
        (f"{LAUNCH}torch_distributed --nnodes=1 -- python3 train.py --b", ("train.py", "--b")),
        (f"{LAUNCH}deepspeed python3 -m package", ("-m", "package")),
        (f"{LAUNCH}deepspeed python -m determined.launch.wrap_rank RANK -- python3 t.py", ("t.py",)),
    ],
)
def test_an_entrypoint_names_its_script(entrypoint: Any, words: tuple[str, ...]) -> None:
    assert read_entrypoint(entrypoint) == ScriptEntrypoint(words=words)


@pytest.mark.parametrize(
    ("entrypoint", "said", "fix"),
    [
        (None, "missing", ENTRYPOINT_FORM),
        ("", "is empty", ENTRYPOINT_FORM),
        ("python3 -m determined_ds.train", "names no trial", ENTRYPOINT_FORM),
        (
            "python3 -m determined_ds.train --test trial:Trial",
            "'--test' is not MODULE:CLASS",
            ENTRYPOINT_FORM,
        ),
        ("python3 -m determined_ds.train trial.py", "'trial.py' is not MODULE:CLASS", ENTRYPOINT_FORM),
        ("python3 -m determined_ds.train ..:Trial", "is not MODULE:CLASS", ENTRYPOINT_FORM),
        ("python3 -m determined_ds.train a:1", "is not MODULE:CLASS", ENTRYPOINT_FORM),
        (
            "python3 -m determined_ds.trian trial:Trial",
            "neither a trial nor a script",
            "did you mean determined_ds.train",
        ),
        ("python3 trial:Trial", "is a class, not a file", ENTRYPOINT_FORM),
        (["trial:Trial"], "a list names a program", "trial:Trial"),
        ("python3 'unclosed", "cannot be split", ENTRYPOINT_FORM),
        (7, "must be a command, not an integer", ENTRYPOINT_FORM),
        ({"a": 1}, "must be a command, not a mapping", ENTRYPOINT_FORM),
        (["python3", 3], "must be a command, not a list", ENTRYPOINT_FORM),
        ("python3", "names no file", ENTRYPOINT_FORM),
        ("python3 -c 'import x'", "names no file", ENTRYPOINT_FORM),
        ("python3 -m", "names no module", ENTRYPOINT_FORM),
        ("./train.py", "runs ./train.py, not Python", "python3 ./train.py"),
        ("bash train.sh", "runs bash, not Python", "python3 train.py"),
        ("A=1 python3 train.py", "sets environment variables", "environment.environment_variables"),
        ("pip install x && python3 train.py", "'&&', which only a shell", "startup-hook.sh"),
        ("python3 train.py --out $HOME", "'$', which only a shell", "startup-hook.sh"),
        ("torchrun --nproc_per_node 2 train.py", "starts ranks by torchrun", "slots_per_trial"),
        (
            "python3 -m torch.distributed.run train.py",
            "starts ranks by torch.distributed.run",
            "slots_per_trial",
        ),
        (f"{LAUNCH}deepspeed --trial trial", "'trial' is not MODULE:CLASS", "--trial model_def:MyTrial"),
        (f"{LAUNCH}deepspeed --trial trial:Trial --more", "'--more' after --trial", "leave it out"),
        (f"{LAUNCH}deepspeed", "names nothing to run", ENTRYPOINT_FORM),
        (
            f"{LAUNCH}torch_distributed --nnodes 1 python3 train.py",
            "'--nnodes' is not an option",
            "-- python3 train.py",
        ),
        (f"{LAUNCH}horovod python3 train.py", "starts no ranks for DeepSpeed", "torch_distributed"),
    ],
)
def test_any_other_entrypoint_is_refused_with_the_form(entrypoint: Any, said: str, fix: str) -> None:
    with pytest.raises(EntrypointError) as caught:
        read_entrypoint(entrypoint)
    (problem,) = caught.value.problems
    assert said in problem.message
    assert fix in problem.fix
