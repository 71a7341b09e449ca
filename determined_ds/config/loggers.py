"""``hyperparameters.logging``: the tools that a team looks at its runs in, each with its options.

The options are those of the tool's own client, by the same names. What identifies a run, what it is resumed from and
what is sent of it is not among them: the library decides that, so that a resumed run continues in every tool.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from determined_ds.config.models import option, read_model, wrong_type
from determined_ds.documents.document import Document, unknown_key
from determined_ds.errors import NOT_GIVEN, Problem

LOGGING = "logging"
# An option that would be a secret: it is stored with the configuration, and everyone who sees the experiment sees it.
SECRET = re.compile(r"(?:.*_)?(?:key|token|password|passwd|secret|credentials?)", re.IGNORECASE)
PASSWORD_IN_URL = re.compile(r"://[^/\s:@]*:[^/\s@]+@")
WANDB_KEY = re.compile(r"wandb_v\d_\w{20,}")  # an older one, 40 hexadecimal digits, may as well be a commit
BY_THE_RUN = "remove it: a run is continued in the tool when it is resumed, by an id that is kept with it"
Scalar = str | int | float | bool | None


@dataclass(frozen=True, kw_only=True)
class WandbOptions:
    """Options of ``wandb.init``."""

    project: str | None = option(None, "The project that the run appears in.")
    entity: str | None = option(None, "The user or the team that owns the project.")
    name: str | None = option(None, "The name of the run; by default that of the experiment.")
    group: str | None = option(None, "The group that the run is shown in.")
    job_type: str | None = option(None, "The kind of the run, for filtering.")
    notes: str | None = option(None, "A description of the run.")
    tags: list[str] | None = option(None, "Tags for filtering.")
    mode: Literal["online", "offline", "disabled"] | None = option(None, "Where the run is sent to.")
    dir: str | None = option(None, "The folder of the client's own files.")


@dataclass(frozen=True, kw_only=True)
class MlflowOptions:
    """Where MLflow stores a run, and as what."""

    tracking_uri: str | None = option(None, "The server; without one, a folder of the run.")
    experiment_name: str | None = option(None, "The experiment that the run appears in.")
    run_name: str | None = option(None, "The name of the run; by default that of the experiment.")
    tags: dict[str, Scalar] | None = option(None, "Tags of the run.", fix="write e.g. tags: {team: vision}")


@dataclass(frozen=True, kw_only=True)
class Loggers:
    """The tools; each is a mapping of options, ``true`` for none of them, or ``false``."""

    wandb: WandbOptions | None = option(None, "Report the run to Weights & Biases.", form="mapping")
    mlflow: MlflowOptions | None = option(None, "Report the run to MLflow.", form="mapping")


@dataclass(frozen=True, kw_only=True)
class KnownTool:
    """A tool that a run can be reported to.

    Args:
        title: What people call it.
        options: The model of those that may be stated.
        module: What its client is imported as.
        package: What pip installs; an extra of this package has the same name as the tool.
        elsewhere: Options that are not taken, each with what to write instead.
        secret: The environment variable of its key or password.
        fix: What to try where it does not take a run.
    """

    title: str
    options: type
    module: str
    package: str
    elsewhere: Mapping[str, str]
    secret: str
    fix: str


TOOLS: Mapping[str, KnownTool] = {
    "wandb": KnownTool(
        title="Weights & Biases",
        options=WandbOptions,
        module="wandb",
        package="wandb",
        elsewhere={
            "team": "entity",
            "run_name": "name",
            "config": "remove it: the configuration is sent, with where each value came from",
            **dict.fromkeys(("id", "resume", "resume_from", "reinit"), BY_THE_RUN),
        },
        secret="WANDB_API_KEY",
        fix="run `wandb login`, or set WANDB_API_KEY; without a network, write wandb: {mode: offline}",
    ),
    "mlflow": KnownTool(
        title="MLflow",
        options=MlflowOptions,
        module="mlflow",
        package="mlflow-skinny",
        elsewhere={"project": "experiment_name", "name": "run_name", "run_id": BY_THE_RUN},
        secret="MLFLOW_TRACKING_TOKEN, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        fix="see that the server of tracking_uri (MLFLOW_TRACKING_URI) answers from this machine",
    ),
}


def read_loggers(document: Document, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """The tools of ``logging``, each with its options.

    Args:
        document: The hyperparameters.
        problems: Every mistake is added.
    """
    stated = document.get((LOGGING,))
    if not isinstance(stated, dict):
        if stated is not None:
            form = (
                f"{{{stated}: {{}}}}"
                if isinstance(stated, str) and stated in TOOLS
                else "{wandb: {project: x}}"
            )
            problems.append(
                wrong_type(document, (LOGGING,), "a mapping of tools", f"write {LOGGING}: {form}")
            )
        return {}
    found: dict[str, dict[str, Any]] = {}
    for name, options in stated.items():
        path, tool = (LOGGING, name), TOOLS.get(name)
        if tool is None:
            problems.append(unknown_key(document, path, TOOLS))
            continue
        if isinstance(options, bool):
            found |= {name: {}} if options else {}
            continue
        if not isinstance(options, dict):
            fix = f"write {name}: {{}}, or false"
            problems.append(wrong_type(document, path, "a mapping of options", fix))
            continue
        known = [each.name for each in fields(tool.options)]
        secrets = [key for key, value in options.items() if is_secret_option(key, value)]
        for key in secrets:
            message = "is a secret, and everyone who sees the experiment could read it"
            fix = f"remove it, and set {tool.secret} in the environment; a key that others have seen should be revoked"
            problems.append(document.problem((*path, key), message, fix, "logger-secret", value="***"))
        problems += [
            unknown_key(document, (*path, key), known, tool.elsewhere)
            for key in options
            if key not in known and key not in secrets
        ]
        without = document.overwritten_all(((*path, key), None, "") for key in secrets)
        found[name] = read_model(tool.options, without if secrets else document, path, problems)
    return found


def is_secret_option(name: Any, value: Any) -> bool:
    """Whether an option of a tool is its key or password, which is refused."""
    if not isinstance(value, str):
        return False
    is_key = WANDB_KEY.fullmatch(value) or PASSWORD_IN_URL.search(value)
    return bool(is_key) or SECRET.fullmatch(str(name)) is not None


def missing_keys(document: Document, environ: Mapping[str, str]) -> list[Problem]:
    """A warning where Weights & Biases finds no key here, as far as that can be seen without its client.

    Args:
        document: The hyperparameters.
        environ: Environment variables.
    """
    options = read_loggers(document, []).get("wandb")
    if options is None or (options.get("mode") or environ.get("WANDB_MODE") or "online") != "online":
        return []
    home = Path(environ.get("HOME") or Path.home())
    netrc = Path(environ.get("NETRC") or home / ".netrc")
    if netrc.is_file() or any(environ.get(name) for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE")):
        return []
    message = "finds no key on this machine, so that the run would not be reported"
    return [document.problem((LOGGING, "wandb"), message, TOOLS["wandb"].fix, "logger-key", value=NOT_GIVEN)]


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
