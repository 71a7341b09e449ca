"""``hyperparameters.logging``: the tools that a team looks at its runs in, each with its options.

The options are those of the tool's own client, by the same names. What identifies a run, what it is resumed from and
what is sent of it is not among them: the library decides that, so that a resumed run continues in every tool.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from determined_ds.documents.document import Document, KeyPath, unknown_key
from determined_ds.documents.values import KINDS, kind_of, type_fix
from determined_ds.errors import NOT_GIVEN, Problem

LOGGING = "logging"
TEXTS = "texts"  # the kind of an option that is a list of texts
MODES = ("online", "offline", "disabled")
# An option that would be a secret: it is stored with the configuration, and everyone who sees the experiment sees it.
SECRET = re.compile(r"(?:.*_)?(?:key|token|password|passwd|secret|credentials?)", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
WANDB_KEY = re.compile(r"[0-9a-f]{40}|wandb_v\d_\w{20,}")
BY_THE_RUN = "remove it: a run is continued in the tool when it is resumed, by an id that is kept with it"
SENT = "remove it: the configuration is sent, with where each value came from"


@dataclass(frozen=True, kw_only=True)
class KnownTool:
    """A tool that a run can be reported to.

    Args:
        title: What people call it.
        module: What its client is imported as; "" where none is needed.
        package: What pip installs; an extra of this package has the same name as the tool.
        options: Those that may be stated, each with its type; :data:`TEXTS` for a list of texts.
        elsewhere: Options that are not taken, each with what to write instead.
        secret: The environment variable of its key or password.
        fix: What to try where it does not take a run.
    """

    title: str
    module: str = ""
    package: str = ""
    options: Mapping[str, type | str] = field(default_factory=dict)
    elsewhere: Mapping[str, str] = field(default_factory=dict)
    secret: str = ""
    fix: str = "see that there is room on the disk"


TOOLS: Mapping[str, KnownTool] = {
    "wandb": KnownTool(
        title="Weights & Biases",
        module="wandb",
        package="wandb",
        options={
            **dict.fromkeys(("project", "entity", "name", "group", "job_type", "notes", "mode", "dir"), str),
            "tags": TEXTS,
        },
        elsewhere={
            "team": "entity",
            "project_name": "project",
            "run_name": "name",
            "config": SENT,
            **dict.fromkeys(("id", "resume", "resume_from", "reinit"), BY_THE_RUN),
        },
        secret="WANDB_API_KEY",
        fix="run `wandb login`, or set WANDB_API_KEY; without a network, write wandb: {mode: offline}",
    ),
    "mlflow": KnownTool(
        title="MLflow",
        module="mlflow",
        package="mlflow-skinny",
        options={**dict.fromkeys(("tracking_uri", "experiment_name", "run_name"), str), "tags": dict},
        elsewhere={
            "uri": "tracking_uri",
            "experiment": "experiment_name",
            "project": "experiment_name",
            "name": "run_name",
            "run_id": BY_THE_RUN,
        },
        secret="MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        fix="see that the server of tracking_uri (MLFLOW_TRACKING_URI) answers from this machine",
    ),
    "comet": KnownTool(
        title="Comet",
        module="comet_ml",
        package="comet-ml",
        options={
            **dict.fromkeys(("project_name", "workspace", "offline_directory", "name"), str),
            "online": bool,
            "tags": TEXTS,
        },
        elsewhere={
            "project": "project_name",
            "experiment_name": "name",
            "mode": "write online: false to write an archive for `comet upload`",
            "experiment_key": BY_THE_RUN,
        },
        secret="COMET_API_KEY",
        fix="run `comet login`, or set COMET_API_KEY; without a network, write comet: {online: false}",
    ),
    "csv": KnownTool(title="a CSV file"),
    "tensorboard": KnownTool(title="TensorBoard", module="tensorboard", package="tensorboard"),
}
OTHER_NAMES = {
    "weights_and_biases": "wandb",
    "comet_ml": "comet",
    "csv_monitor": "csv",
    "tb": "tensorboard",
}


def read_loggers(document: Document, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The tools of ``logging``, each with its options.

    Args:
        document: The hyperparameters.
        problems: Every mistake is added.
    """
    stated = document.get((LOGGING,))
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        form = (
            f"write {LOGGING}: {{{stated}: {{}}}}"
            if isinstance(stated, str) and stated in TOOLS
            else "write e.g. logging: {wandb: {project: x}}"
        )
        problems.append(_wrong(document, (LOGGING,), "a mapping of tools", form))
        return {}
    found = {}
    for name in stated:
        path = (LOGGING, name)
        if name not in TOOLS:
            problems.append(unknown_key(document, path, TOOLS, OTHER_NAMES))
        elif (options := _options(document, path, TOOLS[name], problems)) is not None:
            found[name] = options
    return found


def _options(
    document: Document, path: KeyPath, tool: KnownTool, problems: list[Problem]
) -> dict[str, Any] | None:
    """The options of a tool; None where it is off, or its section is not one."""
    stated = document.get(path)
    if stated is True:
        return {}
    if stated is False:
        return None
    if not isinstance(stated, dict):
        problems.append(_wrong(document, path, "a mapping of options", f"write {path[-1]}: {{}}, or false"))
        return None
    found = {}
    for name, value in stated.items():
        here = (*path, name)
        if is_secret_option(name, value):
            problems.append(_secret(document, here, tool))
        elif not tool.options:
            fix = f"write {path[-1]}: {{}}"
            problems.append(document.problem(here, "has no options", fix, "unknown-key", value=NOT_GIVEN))
        elif name not in tool.options:
            problems.append(unknown_key(document, here, tool.options, tool.elsewhere))
        elif value is not None and (problem := _type_problem(document, here, tool.options[name])):
            problems.append(problem)
        elif value is not None:
            found[name] = value
    return found


def is_secret_option(name: Any, value: Any) -> bool:
    """Whether an option of a tool is its key or password, which is refused."""
    if not isinstance(value, str):
        return False
    is_key = WANDB_KEY.fullmatch(value) or PASSWORD_IN_URL.search(value)
    return bool(is_key) or (SECRET.fullmatch(str(name)) is not None and name != "experiment_key")


def _secret(document: Document, path: KeyPath, tool: KnownTool) -> Problem:
    message = "is a secret, and everyone who sees the experiment could read it"
    where = f"remove it, and set {tool.secret} in the environment" if tool.secret else "remove it"
    fix = f"{where}; a key that others have seen should be revoked"
    return document.problem(path, message, fix, "logger-secret", value="***")


def _type_problem(document: Document, path: KeyPath, kind: type | str) -> Problem | None:
    value = document.get(path)
    if kind == TEXTS:
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            return None
        return _wrong(document, path, "a list of texts", f"write {path[-1]}: [a, b]")
    assert isinstance(kind, type)
    if not isinstance(value, kind):
        return _wrong(document, path, KINDS[kind], type_fix(kind, value))
    if isinstance(value, dict) and (
        odd := [key for key, each in value.items() if isinstance(each, (dict, list))]
    ):
        return _wrong(document, (*path, odd[0]), "a text or a number", "write e.g. tags: {team: vision}")
    if path[-1] == "mode" and value not in MODES:
        fix = f"use one of {', '.join(MODES)}"
        return document.problem(path, "is not a mode of a run", fix, "out-of-range")
    return None


def _wrong(document: Document, path: KeyPath, wanted: str, fix: str) -> Problem:
    message = f"must be {wanted}, not {kind_of(document.get(path))}"
    return document.problem(path, message, fix, "wrong-type")


def missing_keys(document: Document, environ: Mapping[str, str]) -> list[Problem]:
    """A warning for each tool whose client finds no key here, as far as that can be seen without the client.

    Args:
        document: The hyperparameters.
        environ: Environment variables.
    """
    tools, found = read_loggers(document, []), []
    home = Path(environ.get("HOME") or Path.home())
    if "wandb" in tools:
        mode = tools["wandb"].get("mode") or environ.get("WANDB_MODE") or "online"
        files = [Path(environ.get("NETRC") or home / ".netrc")]
        if mode == "online" and not _has_key(environ, "WANDB_API_KEY WANDB_IDENTITY_TOKEN_FILE", files):
            found.append("wandb")
    if "comet" in tools:
        files = [Path(environ.get("COMET_CONFIG") or home / ".comet.config"), Path(".comet.config")]
        is_online = tools["comet"].get("online", environ.get("COMET_START_ONLINE", "true") != "false")
        if is_online and not _has_key(environ, "COMET_API_KEY", files):
            found.append("comet")
    message = "finds no key on this machine, so that the run would not be reported"
    fixes = {name: TOOLS[name].fix for name in found}
    return [
        document.problem((LOGGING, name), message, fix, "logger-key", value=NOT_GIVEN)
        for name, fix in fixes.items()
    ]


def _has_key(environ: Mapping[str, str], names: str, files: Iterable[Path]) -> bool:
    return any(environ.get(name) for name in names.split()) or any(file.is_file() for file in files)


def lost_on_cluster(document: Document, variables: str) -> list[Problem]:
    """A warning where MLflow is given no server: what it writes lies in a container, and ends with it.

    Args:
        document: The hyperparameters.
        variables: The experiment's environment variables, as a text.
    """
    options, name = read_loggers(document, []).get("mlflow"), "MLFLOW_TRACKING_URI"
    if options is None or "tracking_uri" in options or name in variables:
        return []
    message = f"has no tracking_uri: unless the image sets {name}, the run is in a file of the container"
    fix = "write mlflow: {tracking_uri: http://HOST:5000}"
    return [document.problem((LOGGING, "mlflow"), message, fix, "logger-server", value=NOT_GIVEN)]


def missing_loggers(document: Document) -> list[Problem]:
    """A problem for each tool of the hyperparameters whose client is not installed on this machine."""
    return [
        document.problem(
            (LOGGING, name),
            f"{TOOLS[name].title} needs the package {TOOLS[name].package}, which is not installed on this machine",
            f"pip install '{TOOLS[name].package}' (on a cluster: in environment.image, or in startup-hook.sh), or "
            f"remove it",
            "missing-package",
            value=NOT_GIVEN,
        )
        for name in read_loggers(document, [])
        if TOOLS[name].module and find_spec(TOOLS[name].module) is None
    ]
