"""What a secret looks like, and a configuration without its secrets, as it is stored.

In what is stored, a secret is a placeholder that names an environment variable::

    environment: {environment_variables: ["HF_TOKEN=<secret HF_TOKEN, not stored>"]}

The parent of a process that reads such a file passes the values as environment variables (:func:`secrets_of`), and
the process restores them (:func:`restored`).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from determined_ds.config.params import LOGGING, is_secret_option
from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.text import dump_yaml
from determined_ds.errors import ConfigError, Problem

# What it is -> its form, which begins with a literal, so that a large file is quickly looked through.
TEXTS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}",
    "an AWS access key": r"(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60}",
    "a Hugging Face token": r"hf_[A-Za-z]{34}\b",
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}\b",
    "a Slack token": r"xox[abprs]-[0-9A-Za-z-]{20}",
    "a Weights & Biases key": r"WANDB_API_KEY[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b",
    "a secret AWS key": r"(?:aws|AWS)_(?i:secret_access_key)[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+=]{40}\b",
}
_FORMS = {name: re.compile(form.encode()) for name, form in TEXTS.items()}
PASSWORD_IN_URL = re.compile(r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)")

# Names of environment variables; as the last word of a name, so that TOKENIZERS_PARALLELISM does not match.
VARIABLE_NAMES = re.compile(
    r"(?:.*_)?(?:TOKEN|KEY|API_?KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH|ACCESS_KEY_ID|CONNECTION_STRING)"
    r"|.*_(?:PWD|PASS)|.*(?:SECRET|PASSWORD|PASSWD)(?!.*_(?:FILE|PATH|DIR|NAME|URL|ID)$).*",
    re.IGNORECASE,
)
# Keys of a configuration where Determined keeps credentials, which only a cluster reads; and anywhere else, where a
# ``pad_token`` is not a secret.
OF_CLUSTER = ("checkpoint_storage", "tensorboard_storage", "integrations", "data_layer")
OF_CONTAINER = ("registry_auth", "pod_spec")
CLUSTER_KEYS = re.compile(
    r"(?:.*_)?(?:password|auth|\w*token|secret|\w*key|credentials?|connection_string)|.*_pass", re.IGNORECASE
)
KEYS = re.compile(
    r"(?:.*_)?(?:password|passphrase|secret|secret_?key|access_?key|api_?key|(?:auth|access|hf|hub)_token|private_key"
    r"|connection_string)|.*_pass",
    re.IGNORECASE,
)
NO_SECRETS = ("", "0", "1", "true", "false", "yes", "no", "none", "null", "auto")

VARIABLES: KeyPath = ("environment", "environment_variables")
PLACEHOLDER = re.compile(r"<secret (\w+), not stored>")


def secret_text(content: bytes) -> tuple[str, int] | None:
    """What a text holds that looks like a secret, and the offset of the first; None where there is none."""
    found = [(match.start(), name) for name, form in _FORMS.items() if (match := form.search(content))]
    return (min(found)[1], min(found)[0]) if found else None


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an experiment configuration with placeholders for its secrets; those that it has stay."""
    return _masked(config)[0]


def secrets_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The secrets of an experiment configuration that a process here may need, by their variables in :func:`masked`.

    Args:
        config: The experiment configuration.
    """
    return {name: value for path, name, value in _masked(config)[1] if not _is_of_cluster(path)}


def stored_yaml(config: Mapping[str, Any]) -> str:
    """An experiment configuration as it is written to a file: :func:`masked`, with a line on top that names them."""
    without = masked(config)
    names = ", ".join(dict.fromkeys(name for _, name in _placeholders(without)))
    head = f"# Secrets are not stored: {names}. det-ds takes them from the environment; a cluster does not.\n"
    return f"{head if names else ''}{dump_yaml(without)}"


def masked_command(words: Sequence[str]) -> str:
    """A command line as it was typed, without the secrets in its words; see :func:`masked_override`."""
    return shlex.join(map(masked_override, words))


def masked_override(word: str) -> str:
    """A word of a command line, with ``***`` for the value of a KEY=VALUE that is or holds a secret."""
    from determined_ds.experiment.experiment import read_override  # late: the experiment reads this module

    flag = "--set=" if word.startswith("--set=") else ""
    key, equals, text = word.removeprefix(flag).partition("=")
    try:
        path, config = read_override(f"{key}{equals}{text}")
    except ConfigError:  # an option, a file, or a value that is not YAML
        path, config = (key,), text
    for step in reversed(path):
        config = {step: config}
    if equals and (_is_variable(str(path[-1]), text) or _masked(config)[1]):
        return f"{flag}{key}=***"
    return _hide_texts(word, lambda _: "***")


def restored(document: Document, environ: Mapping[str, str], *, required: bool = True) -> Document:
    """A configuration with the values that its placeholders stand for.

    Those that only a cluster reads stay.

    Args:
        document: An experiment's configuration, or a part of one.
        environ: Environment variables.
        required: Whether a value that is missing is refused; else its placeholder stays.

    Raises:
        ConfigError: every value that is missing.
    """
    there = _placeholders(document.data)
    missing = [each for each in there if each[1] not in environ and not _is_of_cluster(each[0])]
    if missing and required:
        message = "is a secret, whose value was not stored"
        fix = "set it in the environment: export {}=...; or give the configuration that has it"
        raise ConfigError(
            document.problem(path, message, fix.format(name), "secret-missing", value=name)
            for path, name in missing
        )

    def value_of(_: KeyPath, text: str) -> str:
        return PLACEHOLDER.sub(lambda found: environ.get(found[1], found[0]), text)

    return document.holding(_walked(document.data, (), value_of)) if there else document


def secret_problems(document: Document) -> list[Problem]:
    """A warning for each secret of an experiment's configuration, which a cluster shows, and for each placeholder."""
    problems = []
    for path, name, _ in _masked(document.data)[1]:
        if path[:2] == ("hyperparameters", LOGGING) and is_secret_option(path[-1], document.get(path)):
            continue  # refused, with the hyperparameters
        is_variable = path[:2] == VARIABLES
        what = f"{name} looks like a secret" if is_variable else "looks like a secret"
        fix = "leave it out: det-ds run hands its environment to the ranks; on a cluster, read a mounted file"
        message = f"{what}, and everyone who sees the experiment can read it"
        value = f"{name}=***" if is_variable else "***"
        problems.append(document.problem(path, message, fix, "secret", value=value))
    return [*problems, *placeholders_left(document)]


def placeholders_left(document: Document) -> list[Problem]:
    """The problem of each placeholder in a configuration that a cluster reads, and takes for the value."""
    message = "stands for a secret whose value was not stored; a cluster takes it for the value"
    fix = "write the value before it is submitted; det-ds run takes it from the environment variable {}"
    return [
        document.problem(path, message, fix.format(name), "secret-missing", value=_placeholder(name))
        for path, name in _placeholders(document.data)
    ]


# ------------------------------------------------------------------------------------------------- finding


def _is_variable(name: str, value: str) -> bool:
    """Whether an environment variable is a secret, by its name."""
    return VARIABLE_NAMES.fullmatch(name) is not None and value.lower() not in NO_SECRETS


def _is_of_cluster(path: KeyPath) -> bool:
    """Whether a place is one that is read on a cluster only."""
    return path[0] in OF_CLUSTER or (path[0] == "environment" and path[1:2] != VARIABLES[1:])


def _masked(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[KeyPath, str, str]]]:
    """The configuration with placeholders, and of each the path, the variable and the value."""
    found: list[tuple[KeyPath, str, str]] = []
    known: dict[str, str | None] = {name: None for _, name in _placeholders(config)}  # variable -> value

    def note(path: KeyPath, variable: str, value: str) -> str:
        """The placeholder of a value; two values never share one."""
        name, number = variable, 1
        while known.setdefault(name, value) != value:
            number += 1
            name = f"{variable}_{number}"
        found.append((path, name, value))
        return _placeholder(name)

    def hide(path: KeyPath, text: str) -> str:
        if PLACEHOLDER.search(text):
            return text
        if path[:2] == VARIABLES:
            variable, equals, value = text.partition("=")
            held = _is_variable(variable, value) or secret_text(value.encode(errors="replace")) is not None
            if equals and variable.isidentifier() and (held or PASSWORD_IN_URL.search(value)):
                return f"{variable}={note(path, variable, value)}"
        key = next((step for step in reversed(path) if isinstance(step, str) and step != "val"), "")
        of_cluster = path[0] in OF_CLUSTER or any(section in path for section in OF_CONTAINER)
        name = "DET_DS_" + re.sub(r"\W", "_", "_".join(str(step) for step in path if step != "val")).upper()
        is_secret = (CLUSTER_KEYS if of_cluster else KEYS).fullmatch(key) and text.lower() not in NO_SECRETS
        if path[:2] != VARIABLES and is_secret:
            return note(path, name, text)
        return _hide_texts(text, lambda value: note(path, name, value))

    data: dict[str, Any] = _walked(dict(config), (), hide)
    return data, found


def _hide_texts(text: str, hide: Callable[[str], str]) -> str:
    """A text with what looks like a secret in it hidden; all of it, where that is a private key."""
    found = secret_text(text.encode(errors="replace"))
    if found is not None and found[0] == "a private key":
        return hide(text)
    for form in TEXTS.values() if found is not None else ():
        text = re.sub(form, lambda match: hide(match[0]), text)
    return PASSWORD_IN_URL.sub(lambda match: hide(match[0]), text)


def _placeholder(variable: str) -> str:
    return f"<secret {variable}, not stored>"


def _placeholders(config: Any) -> list[tuple[KeyPath, str]]:
    found: list[tuple[KeyPath, str]] = []

    def look(path: KeyPath, text: str) -> str:
        found.extend((path, name) for name in PLACEHOLDER.findall(text))
        return text

    _walked(config, (), look)
    return found


def _walked(value: Any, path: KeyPath, change: Callable[[KeyPath, str], str]) -> Any:
    """A copy with each text changed."""
    if isinstance(value, dict):
        return {key: _walked(item, (*path, key), change) for key, item in value.items()}
    if isinstance(value, list):
        return [_walked(item, (*path, index), change) for index, item in enumerate(value)]
    return change(path, value) if isinstance(value, str) and path else value
