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

from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.text import dump_yaml
from determined_ds.errors import ConfigError, Problem

VARIABLES: KeyPath = ("environment", "environment_variables")
# What it is -> its form, which begins with a literal, so that a large file is quickly looked through.
TEXTS = {
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----\s+[A-Za-z0-9+/=]{20}[\s\S]*",
    "an AWS access key": r"(?:AKIA|ASIA)[0-9A-Z]{16}\b",
    "a GitHub token": r"gh[pousr]_[A-Za-z0-9]{36}|github_pat_[A-Za-z0-9_]{60}",
    "a Hugging Face token": r"hf_[A-Za-z]{34}\b",
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}\b",
    "a Slack token": r"xox[abprs]-[0-9A-Za-z-]{20}",
    "a Weights & Biases key": r"WANDB_API_KEY[\"']?\s*[:=]\s*[\"']?[0-9a-f]{40}\b|wandb_v\d_\w{20,}",
    "a secret AWS key": r"(?:aws|AWS)_(?i:secret_access_key)[\"']?\s*[:=]\s*[\"']?[A-Za-z0-9/+=]{40}\b",
}
PASSWORD_IN_URL = r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)"
# Names of secrets, as the last word of a name; a ``pad_token`` is none.
_KEYS = (
    r"(?:.*_)?(?:password|passphrase|secret|(?:secret|access|api)_?key|(?:auth|access|hf|hub)_token|private_key"
    r"|connection_string)|.*_pass"
)
KEYS = re.compile(_KEYS, re.IGNORECASE)
# The same of environment variables, and of keys that only a cluster reads; TOKENIZERS_PARALLELISM is none.
NAMES = re.compile(
    rf"{_KEYS}|(?:.*_)?(?:(?:identity|registry)?token|key|passwd|credentials?|auth|access_key_id)|.*_pwd"
    r"|.*(?:secret|password|passwd)(?!.*_(?:file|path|dir|name|url|id)$).*",
    re.IGNORECASE,
)
NO_SECRETS = ("", "0", "1", "true", "false", "yes", "no", "none", "null", "auto")
OF_CLUSTER = ("checkpoint_storage", "tensorboard_storage", "integrations", "data_layer", "environment")
PLACEHOLDER = "<secret {}, not stored>"
_PLACEHOLDERS = re.compile(PLACEHOLDER.format(r"(\w+)"))


def secret_text(content: bytes) -> tuple[str, int] | None:
    """What a text holds that looks like a secret, and the offset of the first; None where there is none."""
    matches = {name: re.search(form.encode(), content) for name, form in TEXTS.items()}
    found = sorted((match.start(), name) for name, match in matches.items() if match)
    return (found[0][1], found[0][0]) if found else None


def masked(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of an experiment configuration with placeholders for its secrets; those that it has stay."""
    return _masked(config)[0]


def secrets_of(config: Mapping[str, Any]) -> dict[str, str]:
    """The secrets of an experiment configuration that a process here may need, by their variables in :func:`masked`."""
    found = _masked(config)[1]
    return {name: value for path, name, value in found if value is not None and not _is_of_cluster(path)}


def stored_yaml(config: Mapping[str, Any]) -> str:
    """An experiment configuration as it is written to a file: :func:`masked`, with a line on top that names them."""
    without, found = _masked(config)
    names = ", ".join(dict.fromkeys(name for _, name, _ in found))
    head = f"# Secrets are not stored: {names}. det-ds takes them from the environment; a cluster does not.\n"
    return f"{head if found else ''}{dump_yaml(without)}"


def masked_command(words: Sequence[str]) -> str:
    """A command line as it was typed, without the secrets in its words; see :func:`masked_override`."""
    return shlex.join(map(masked_override, words))


def masked_override(word: str) -> str:
    """A word of a command line, with ``***`` for the value of a KEY=VALUE that is or may hold a secret."""
    value = word.removeprefix("--set=").partition("=")[2]
    if any(_is_secret(NAMES, name, value) for name in re.findall(r"\w+", word)):
        return f"{word.removesuffix(value)}***"
    return _without_texts(word, lambda _: "***")


def restored(document: Document, environ: Mapping[str, str], *, required: bool = True) -> Document:
    """A configuration with the values that its placeholders stand for; those that only a cluster reads may stay.

    Args:
        document: An experiment's configuration, or a part of one.
        environ: Environment variables.
        required: Whether a value that is missing is refused; else its placeholder stays.

    Raises:
        ConfigError: every value that is missing.
    """
    message = "is a secret, whose value was not stored"
    fix = "set it in the environment: export {}=...; or give the configuration that has it"
    problems = [
        document.problem(path, message, fix.format(name), "secret-missing", value=name)
        for path, name, value in _masked(document.data)[1]
        if required and value is None and name not in environ and not _is_of_cluster(path)
    ]
    if problems:
        raise ConfigError(problems)

    def value_of(_: KeyPath, text: str) -> str:
        return _PLACEHOLDERS.sub(lambda found: environ.get(found[1], found[0]), text)

    return document.holding(_changed(document.data, value_of))


def secret_problems(document: Document) -> list[Problem]:
    """A warning for each secret of an experiment's configuration, which a cluster shows, and for each placeholder."""
    shown_to_all = "looks like a secret, and everyone who sees the experiment can read it"
    leave_out = "leave it out: ranks of det-ds run have its environment; on a cluster, read a mounted file"
    taken = "stands for a secret whose value was not stored; a cluster takes it for the value"
    write = "write the value before it is submitted; det-ds run takes it from the environment variable"
    problems = []
    for path, name, value in _masked(document.data)[1]:
        if value is None:
            shown, code = PLACEHOLDER.format(name), "secret-missing"
            problems.append(document.problem(path, taken, f"{write} {name}", code, value=shown))
        else:
            shown = f"{name}=***" if path[:2] == VARIABLES else "***"
            problems.append(document.problem(path, shown_to_all, leave_out, "secret", value=shown))
    return problems


def _masked(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[KeyPath, str, str | None]]]:
    """The configuration with placeholders; and of each the path, the variable and the value, None if it stood there."""
    found: list[tuple[KeyPath, str, str | None]] = []
    values: dict[str, str | None] = dict.fromkeys(_PLACEHOLDERS.findall(str(config)))  # of each variable

    def hidden(path: KeyPath, variable: str, value: str) -> str:
        """The placeholder of a value; two values never share one."""
        name, number = variable, 1
        while values.setdefault(name, value) != value:
            number += 1
            name = f"{variable}_{number}"
        found.append((path, name, value))
        return PLACEHOLDER.format(name)

    def without_secrets(path: KeyPath, text: str) -> str:
        if there := _PLACEHOLDERS.findall(text):
            found.extend((path, name, None) for name in there)
            return text
        variable, equals, value = text.partition("=")
        if path[:2] == VARIABLES and equals and variable.isidentifier():
            if _is_secret(NAMES, variable, value) or _without_texts(value, lambda _: "") != value:
                text = f"{variable}={hidden(path, variable, value)}"
            return text
        steps = [step for step in path if step != "val"]  # of a constant hyperparameter
        name = "DET_DS_" + re.sub(r"\W", "_", "_".join(map(str, steps))).upper()
        key = next((step for step in reversed(steps) if isinstance(step, str)), "")
        if _is_secret(NAMES if _is_of_cluster(path) else KEYS, key, text):
            return hidden(path, name, text)
        return _without_texts(text, lambda value: hidden(path, name, value))

    return _changed(config, without_secrets), found


def _is_secret(names: re.Pattern[str], name: str | int, value: str) -> bool:
    """Whether a value is a secret by its name."""
    return names.fullmatch(str(name)) is not None and value.lower() not in NO_SECRETS


def _is_of_cluster(path: KeyPath) -> bool:
    """Whether a place is one that is read on a cluster only."""
    return path[0] in OF_CLUSTER and path[:2] != VARIABLES


def _without_texts(text: str, hidden: Callable[[str], str]) -> str:
    """A text in which all that looks like a secret is hidden."""
    for form in (*TEXTS.values(), PASSWORD_IN_URL):
        text = re.sub(form, lambda match: hidden(match[0]), text)
    return text


def _changed(value: Any, change: Callable[[KeyPath, str], str], path: KeyPath = ()) -> Any:
    """A copy with each text changed."""
    if isinstance(value, Mapping):
        return {key: _changed(item, change, (*path, key)) for key, item in value.items()}
    if isinstance(value, list):
        return [_changed(item, change, (*path, index)) for index, item in enumerate(value)]
    return change(path, value) if isinstance(value, str) else value
