"""The entrypoint of an experiment: a trial or a script, with any of Determined's launchers before it.

Source: ``determined/exec/launch.py`` and ``determined/launch`` of 0.38.1.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NoReturn

from determined_ds.documents.text import kind_of
from determined_ds.errors import EntrypointError, Problem

TRAIN = "determined_ds.train"
# Modules that start the ranks of a task.
TORCH, DEEPSPEED = "determined.launch.torch_distributed", "determined.launch.deepspeed"
ENTRYPOINT_FORM = f"python3 -m {TORCH} python3 -m {TRAIN} model_defs.gpt2.trial:GPT2Trial"
SCRIPT_FORM = f"python3 -m {TORCH} python3 train.py"
MEASURE = "--measure"  # an option of determined_ds.train that changes what an experiment is
# Modules that would start ranks a second time.
STARTS_RANKS = re.compile(r"(torch\.distributed\.(run|launch)|deepspeed\.launcher|accelerate)(\..*)?")
WORD = r"[^\W\d]\w*"
CLASS = re.compile(rf"{WORD}(?:\.{WORD})*:{WORD}")
PYTHON = re.compile(r"python(\d+(\.\d+)?)?")
PYTHON_VALUES = ("-W", "-X", "--check-hash-based-pycs")  # options of Python with a value in the next word
SHELL = frozenset("&|;<>()`$")


@dataclass(frozen=True, kw_only=True)
class Entrypoint:
    """A trial, which ``determined_ds.train`` trains, or a script, which trains by itself.

    Args:
        words: What is run, without Python and launcher: ``MODULE:CLASS`` and options of ``determined_ds.train``; or a
            script, ``train.py`` or ``-m package.module``, and its arguments.
        is_script: Which of the two it is.
        is_legacy: Whether a trial is in Determined's own form, where the experiment says how long to train.
    """

    words: tuple[str, ...]
    is_script: bool = False
    is_legacy: bool = False

    @property
    def trial(self) -> str:
        """``MODULE:CLASS`` of the trial; "" of a script."""
        return "" if self.is_script else self.words[0]

    @property
    def options(self) -> tuple[str, ...]:
        """The words after the trial; none of a script."""
        return () if self.is_script else self.words[1:]

    @property
    def is_module(self) -> bool:
        """Whether the script is run by ``-m``."""
        return self.words[0] == "-m"

    @property
    def name(self) -> str:
        """The file, or the module, of the script as it is written."""
        return self.words[self.is_module]

    def __str__(self) -> str:
        return shlex.join(["python3", *self.words]) if self.is_script else self.trial


def read_entrypoint(entrypoint: Any) -> Entrypoint:
    """What an entrypoint runs, whichever launcher is before it.

    Args:
        entrypoint: As the experiment has it: a command, or a list of words.

    Raises:
        EntrypointError: it is missing, or runs neither a trial nor a script of Python.
    """
    if entrypoint is None:
        _refuse("missing: it says what to train")
    if isinstance(entrypoint, list) and all(isinstance(word, str) for word in entrypoint):
        words: list[str] = entrypoint
    elif isinstance(entrypoint, str):
        try:
            words = shlex.split(entrypoint)
            parts = shlex.shlex(entrypoint, posix=True, punctuation_chars=True)
            operators = [part for part in parts if part and {*part} <= SHELL]
        except ValueError as error:
            _refuse(f"cannot be split into words: {error}")
        if (operators or "$" in entrypoint) and TRAIN not in words:
            fix = "write one command, e.g. python3 train.py; what comes before it belongs in startup-hook.sh"
            found = [*operators, "$"][0]
            _refuse(f"has {found!r}, which only a shell understands; here the ranks run Python directly", fix)
    else:
        _refuse(f"must be a command, not {kind_of(entrypoint)}")
    if TRAIN in words:
        trial, *stated = words[words.index(TRAIN) + 1 :] or [""]
        options = [part for word in stated for part in (word.split("=", 1) if word[:2] == "--" else [word])]
        if not CLASS.fullmatch(trial):
            _refuse(f"{trial!r} is not MODULE:CLASS, which comes right after {TRAIN}")
        return Entrypoint(words=(trial, *options))
    if isinstance(entrypoint, str) and CLASS.fullmatch(" ".join(words)):
        return Entrypoint(words=tuple(words), is_legacy=True)
    return _of_command(words)


def _of_command(words: list[str]) -> Entrypoint:
    """What ``python3 [-m LAUNCHER [OPTIONS --]] ... (--trial MODULE:CLASS | FILE | -m MODULE)`` runs."""
    program, *rest = words or [""]
    while rest and rest[0].startswith("-") and rest[0] not in ("-m", "-c", "-"):
        rest = rest[2:] if rest[0] in PYTHON_VALUES else rest[1:]
    module, *arguments = rest[1:] if rest[:1] == ["-m"] and len(rest) > 1 else [""]
    if not PYTHON.fullmatch(PurePath(program).name) or STARTS_RANKS.fullmatch(module):
        message = f"runs {module or program!r}, not a trial or script by Python alone"
        fix = "the number of ranks is resources.slots_per_trial, variables are environment.environment_variables"
        _refuse(message, f"write: {SCRIPT_FORM}; {fix}")
    if not rest or rest[0] in ("-c", "-") or rest == ["-m"]:
        _refuse("names no file or module for Python to run")
    if module.split(".")[0] not in ("determined", "determined_ds"):
        return Entrypoint(words=tuple(rest), is_script=True)
    if module not in (TORCH, DEEPSPEED):
        _refuse(f"{module} runs neither a trial nor a script")
    if "--" in arguments and (module == TORCH or arguments[0] == "--"):
        arguments = arguments[arguments.index("--") + 1 :]
    first, equals, trial = (arguments or [""])[0].partition("=")
    if first.startswith("-") and first != "--trial":
        fix = f"write -- between them and the command: {TORCH} {arguments[0]} ... -- python3 train.py"
        _refuse(f"{arguments[0]!r} is not an option of {module}", fix)
    if first != "--trial":
        return _of_command(arguments)
    arguments = [*([trial] if equals else []), *arguments[1:]]
    if len(arguments) != 1 or not CLASS.fullmatch(arguments[0]):
        said = shlex.join(arguments) or "nothing"
        _refuse(f"has {said!r} after --trial, not MODULE:CLASS alone", "write: --trial model_def:MyTrial")
    return Entrypoint(words=tuple(arguments), is_legacy=True)


def _refuse(message: str, fix: str = f"write: {ENTRYPOINT_FORM}") -> NoReturn:
    raise EntrypointError(Problem(key="entrypoint", message=message, fix=fix))
