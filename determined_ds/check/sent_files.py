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
    root, searched_bytes, warned = context_dir.resolve(), 0, list[Problem]()
    bytes_in: Counter[str] = Counter()  # by the first part of the name

    def problem(name: str, line: int, message: str, fix: str, code: str) -> Problem:
        shown = str(context_dir / name)
        origin = Origin(f"{shown}:{line}" if line else shown, file=shown, line=line, column=bool(line))
        return Problem(key="context directory", origin=origin, message=message, fix=fix, code=code)

    for name, num_bytes in _sent(context_dir, ignored):
        top, slash, _ = name.partition("/")
        bytes_in[top + slash] += num_bytes or 0
        if bytes_in.total() > MAX_CONTEXT_BYTES:
            most = bytes_in.most_common(MAX_SHOWN)
            message = f"over {MAX_CONTEXT_BYTES // 2**20} MiB would be sent, more than Determined accepts: "
            message += ", ".join(f"{each} {size / 2**20:.0f} MiB" for each, size in most)
            fix = f"list in {DETIGNORE} what a trial does not need, e.g. /{most[0][0]}"
            return [problem("", 0, f"{message}, so far", fix, "context-too-large")], warned
        path = Path(context_dir, name)
        target = path.resolve() if path.is_symlink() else root
        if num_bytes is None or not target.is_relative_to(root):
            what = "and would be sent as an empty folder" if num_bytes is None else (
                "outside the context directory, and what is there would be sent to the cluster")  # fmt: skip
            fix = f"copy what it leads to if that is needed, or write /{name} in {DETIGNORE}"
            warned.append(problem(name, 0, f"{name} is a link to {target}, {what}", fix, "context-link"))
        if num_bytes is None:
            continue
        found, line = "", 1
        if SECRET_NAMES.fullmatch(name.rpartition("/")[2]):
            found = "its name is typical of secrets"
        elif num_bytes <= MAX_SEARCHED_BYTES and searched_bytes < MAX_SEARCHED_IN_ALL:
            searched_bytes += num_bytes
            with contextlib.suppress(OSError):
                content = path.read_bytes()
                if secret := secret_text(content):
                    found = f"contains what looks like {secret[0]}"
                    line = content.count(b"\n", 0, secret[1]) + 1
        if found:
            fix = f"keep it out of the context directory, or write /{name} in {DETIGNORE}"
            message = f"{name} would be sent to the cluster, and {found}"
            warned.append(problem(name, line, message, fix, "secret"))
    return [], warned


def _sent(context_dir: Path, ignored: Callable[[str], bool]) -> Iterator[tuple[str, int | None]]:
    """Name and size of every file that would be sent; a link to a folder, which is sent empty, has no size."""
    for parent, folders, names in os.walk(context_dir):
        below = os.path.relpath(parent, context_dir)
        prefix = "" if below == os.curdir else below.replace(os.sep, "/") + "/"
        own = (name for name in folders if not (ignored(prefix + name) or ignored(f"{prefix}{name}/")))
        folders[:] = sorted(own)
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

    own, patterns = context_dir / DETIGNORE, []
    lines = [*((0, line) for line in IGNORED_BY_DEFAULT)]
    with contextlib.suppress(OSError):
        lines += enumerate(own.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Determined uses this class
        for number, line in lines:
            try:
                patterns.append(GitWildMatchPattern(line))
            except ValueError:
                origin = Origin(f"{own}:{number}", file=str(own), line=number, column=1)
                message, fix = "is not a valid pattern, and det stops there", "correct the line, or remove it"
                problem = Problem(key=DETIGNORE, value=line, origin=origin, message=message, fix=fix)
                raise ConfigError(problem) from None
    return PathSpec(patterns).match_file
