"""The context directory: what ``det experiment create`` would send of it, how much that is, and what looks secret.

Source: ``os_walk_to_v1Files`` in determined 0.38.1's ``common/detignore.py``, whose choice of files is repeated here
without loading Determined.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from determined_ds.documents.document import words
from determined_ds.errors import ConfigError, Origin, Problem
from determined_ds.experiment.secrets import secret_text

DETIGNORE = ".detignore"
# ``DEFAULT_DETIGNORE`` and ``MAX_CONTEXT_SIZE`` in determined 0.38.1's ``common/constants.py``.
IGNORED_BY_DEFAULT = words("""__pycache__/ *.py[co] *$py.class terraform terraform_data terraform.tfstate*
    terraform.tfvars* .terraform* .git/ .vscode/ .idea/ .mypy_cache/ /shared_fs""")
MAX_CONTEXT_BYTES = 95 * 2**20
MAX_FILES = 50_000
MAX_SHOWN = 5
# A secret is a line of a small file.
MAX_SEARCHED_BYTES = 2**20
MAX_SEARCHED_IN_ALL = 32 * 2**20
SECRET_NAMES = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|jks|keystore)|\.env(\..+)?|\.netrc|\.pypirc|\.npmrc"
    r"|\.htpasswd|kubeconfig|credentials(\.(json|ya?ml|ini|txt))?|secrets?\.(json|ya?ml|toml|ini|txt)"
    r"|service[-_]account.*\.json",
    re.IGNORECASE,
)


def context_problems(context_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with the files that would be sent.

    Returns:
        Errors; and warnings: of secrets, and of links that lead outside or are not followed.
    """
    try:
        ignored = _ignored(context_dir)
    except ConfigError as error:
        return list(error.problems), []
    root = context_dir.resolve()
    total_bytes, searched_bytes = 0, 0
    bytes_in: Counter[str] = Counter()  # by the first part of the name
    files_in: Counter[str] = Counter()
    warned: list[Problem] = []

    def problem(name: str, line: int, message: str, fix: str, code: str) -> Problem:
        shown = str(context_dir / name)
        origin = Origin(f"{shown}:{line}" if line else shown, file=shown, line=line, column=bool(line))
        return Problem(key="context directory", origin=origin, message=message, fix=fix, code=code)

    def too_much(much: str, largest: list[str], first: str) -> Problem:
        message = f"{much}: {', '.join(largest)}, so far"
        fix = f"list in {DETIGNORE} what a trial does not need, e.g. /{first}"
        return problem("", 0, message, fix, "context-too-large")

    for number, (name, num_bytes) in enumerate(_sent(context_dir, ignored), 1):
        top, slash, _ = name.partition("/")
        bytes_in[top + slash] += num_bytes or 0
        files_in[top + slash] += 1
        total_bytes += num_bytes or 0
        if total_bytes > MAX_CONTEXT_BYTES:
            most = bytes_in.most_common(MAX_SHOWN)
            much = f"over {MAX_CONTEXT_BYTES // 2**20} MiB would be sent, more than Determined accepts"
            return [
                too_much(much, [f"{each} {size / 2**20:.0f} MiB" for each, size in most], most[0][0])
            ], warned
        if number > MAX_FILES:
            most = files_in.most_common(MAX_SHOWN)
            much = f"over {MAX_FILES:,} files would be sent, one by one"
            return [], [*warned, too_much(much, [f"{each} {count:,}" for each, count in most], most[0][0])]
        path = os.path.join(context_dir, name)
        if os.path.islink(path):
            target = Path(path).resolve()
            leaves = not target.is_relative_to(root)
            where = f"{target}, outside the context directory" if leaves else str(target.relative_to(root))
            if num_bytes is None:
                message = f"{name} is a link to the folder {where}, and would be sent as an empty folder"
                fix = "copy the folder, or have the trial read its data from where a cluster has it"
                warned.append(problem(name, 0, message, fix, "context-link"))
            elif leaves:
                message = f"{name} is a link to {where}, and what is there would be sent to the cluster"
                fix = f"copy the file if it is meant to be sent, or write /{name} in {DETIGNORE}"
                warned.append(problem(name, 0, message, fix, "context-link"))
        if num_bytes is None:
            continue
        found, line = "", 1
        if SECRET_NAMES.fullmatch(name.rpartition("/")[2]):
            found = "its name is typical of secrets"
        elif num_bytes <= MAX_SEARCHED_BYTES and searched_bytes < MAX_SEARCHED_IN_ALL:
            searched_bytes += num_bytes
            with contextlib.suppress(OSError), open(path, "rb") as file:
                content = file.read()
                secret = secret_text(content)
                if secret:
                    found, line = (
                        f"contains what looks like {secret[0]}",
                        content.count(b"\n", 0, secret[1]) + 1,
                    )
        if found:
            fix = f"keep it out of the context directory, or write /{name} in {DETIGNORE}"
            warned.append(
                problem(name, line, f"{name} would be sent to the cluster, and {found}", fix, "secret")
            )
    return [], warned


def _sent(context_dir: Path, ignored: Callable[[str], bool]) -> Iterator[tuple[str, int | None]]:
    """Name and size of every file that would be sent; a link to a folder, which is sent empty, has no size."""
    for parent, folders, names in os.walk(context_dir):
        below = os.path.relpath(parent, context_dir)
        prefix = "" if below == os.curdir else below.replace(os.sep, "/") + "/"
        folders[:] = sorted(
            name for name in folders if not (ignored(prefix + name) or ignored(f"{prefix}{name}/"))
        )
        yield from ((prefix + name, None) for name in folders if os.path.islink(os.path.join(parent, name)))
        for name in sorted(names):
            if name != DETIGNORE and not ignored(prefix + name):
                with contextlib.suppress(OSError):  # a broken link: `det` reports it and continues
                    yield prefix + name, os.stat(os.path.join(parent, name)).st_size


def _ignored(context_dir: Path) -> Callable[[str], bool]:
    """Whether a name is ignored: the last pattern that matches it decides.

    Raises:
        ConfigError: a line is not a valid pattern.
    """
    from pathspec import PathSpec  # late: not every command needs it
    from pathspec.patterns.gitwildmatch import GitWildMatchPattern

    own, lines = context_dir / DETIGNORE, [*((0, line) for line in IGNORED_BY_DEFAULT)]
    with contextlib.suppress(OSError):
        lines += enumerate(own.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    patterns = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Determined uses this class
        for number, line in lines:
            try:
                patterns.append(GitWildMatchPattern(line))
            except ValueError:
                origin = Origin(f"{own}:{number}", file=str(own), line=number, column=1)
                message, fix = "is not a valid pattern, and det stops there", "correct the line, or remove it"
                raise ConfigError(
                    Problem(key=DETIGNORE, value=line, origin=origin, message=message, fix=fix)
                ) from None
    return PathSpec(patterns).match_file
