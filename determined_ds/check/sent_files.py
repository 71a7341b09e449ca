"""The context directory: which files ``det experiment create`` would send, their size, and what looks secret.

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
from dataclasses import dataclass
from pathlib import Path

from determined_ds.documents.document import words
from determined_ds.errors import Origin, Problem
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


@dataclass(frozen=True, kw_only=True)
class SentFile:
    """A file that would be sent.

    Args:
        name: Its path in the context directory, with ``/``.
        path: Where it lies.
        num_bytes: Its size.
        is_folder: Whether it is a link to a folder.
    """

    name: str
    path: Path
    num_bytes: int
    is_folder: bool = False


def files_sent(context_dir: Path) -> Iterator[SentFile]:
    """Every file that Determined would send of a context directory, and every link to a folder, which it sends empty.

    What cannot be read is skipped.
    """
    ignored = _ignored(context_dir)
    for parent, folders, names in os.walk(context_dir):
        below = os.path.relpath(parent, context_dir)
        prefix = "" if below == os.curdir else below.replace(os.sep, "/") + "/"
        folders[:] = sorted(
            name for name in folders if not (ignored(prefix + name) or ignored(f"{prefix}{name}/"))
        )
        for name in folders:
            if os.path.islink(os.path.join(parent, name)):
                yield SentFile(name=prefix + name, path=Path(parent, name), num_bytes=0, is_folder=True)
        for name in sorted(names):
            if name == DETIGNORE or ignored(prefix + name):
                continue
            path = Path(parent, name)
            try:
                num_bytes = path.stat().st_size
            except OSError:  # a broken link: `det` reports it and continues
                continue
            yield SentFile(name=prefix + name, path=path, num_bytes=num_bytes)


def _ignored(context_dir: Path) -> Callable[[str], bool]:
    import pathspec  # not every command reads the context directory

    lines = [*IGNORED_BY_DEFAULT]
    with contextlib.suppress(OSError):
        lines += (context_dir / DETIGNORE).read_text(encoding="utf-8", errors="replace").splitlines()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Determined uses this class
        spec = pathspec.PathSpec.from_lines(pathspec.patterns.GitWildMatchPattern, lines)
    return spec.match_file


def context_problems(context_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with the files that would be sent.

    Returns:
        Errors; and warnings: of secrets, and of links that lead outside or are not followed.
    """
    root = context_dir.resolve()
    total_bytes, searched_bytes = 0, 0
    by_folder: Counter[str] = Counter()
    files_in: Counter[str] = Counter()
    warned: list[Problem] = []
    for number, file in enumerate(files_sent(context_dir), 1):
        total_bytes += file.num_bytes
        by_folder[_top(file.name)] += file.num_bytes
        files_in[_top(file.name)] += 1
        if total_bytes > MAX_CONTEXT_BYTES:
            shown = [f"{name} {size / 2**20:.0f} MiB" for name, size in by_folder.most_common(MAX_SHOWN)]
            much = f"over {MAX_CONTEXT_BYTES // 2**20} MiB would be sent, more than Determined accepts"
            return [_too_much(context_dir, f"{much}: {', '.join(shown)}, so far", by_folder)], warned
        if number > MAX_FILES:
            shown = [f"{name} {count:,}" for name, count in files_in.most_common(MAX_SHOWN)]
            much = f"over {MAX_FILES:,} files would be sent, one by one"
            return [], [*warned, _too_much(context_dir, f"{much}: {', '.join(shown)}, so far", files_in)]
        link = _link(file, context_dir, root)
        if link:
            warned.append(link)
        if file.is_folder:
            continue
        searched = file.num_bytes <= MAX_SEARCHED_BYTES and searched_bytes < MAX_SEARCHED_IN_ALL
        searched_bytes += file.num_bytes if searched else 0
        secret = _secret(file, context_dir, look_inside=searched)
        if secret:
            warned.append(secret)
    return [], warned


def _top(name: str) -> str:
    first, slash, _ = name.partition("/")
    return first + slash


def _too_much(context_dir: Path, message: str, of: Counter[str]) -> Problem:
    return Problem(
        key="context directory",
        origin=Origin(str(context_dir), file=str(context_dir)),
        message=message,
        fix=f"list in {DETIGNORE} what a trial does not need, e.g. /{of.most_common(1)[0][0]}",
        code="context-too-large",
    )


def _link(file: SentFile, context_dir: Path, root: Path) -> Problem | None:
    """The problem of a link to a folder, or to a file outside the context directory."""
    if not file.path.is_symlink():
        return None
    target = file.path.resolve()
    leaves = not target.is_relative_to(root)
    if not file.is_folder and not leaves:
        return None
    where = f"{target}, outside the context directory" if leaves else str(target.relative_to(root))
    if file.is_folder:
        message = f"{file.name} is a link to the folder {where}, and would be sent as an empty folder"
        fix = "copy the folder, or have the trial read its data from where a cluster has it"
    else:
        message = f"{file.name} is a link to {where}, and what is there would be sent to the cluster"
        fix = f"copy the file if it is meant to be sent, or write /{file.name} in {DETIGNORE}"
    shown = str(context_dir / file.name)
    return Problem(
        key="context directory",
        origin=Origin(shown, file=shown),
        message=message,
        fix=fix,
        code="context-link",
    )


def _secret(file: SentFile, context_dir: Path, *, look_inside: bool) -> Problem | None:
    found, line = "", 1
    if SECRET_NAMES.fullmatch(file.name.rpartition("/")[2]):
        found = "its name is typical of secrets"
    elif look_inside:
        text = _secret_text(file.path)
        if text:
            found, line = f"contains what looks like {text[0]}", text[1]
    if not found:
        return None
    shown = str(context_dir / file.name)
    return Problem(
        key="context directory",
        origin=Origin(f"{shown}:{line}", file=shown, line=line, column=1),
        message=f"{file.name} would be sent to the cluster, and {found}",
        fix=f"keep it out of the context directory, or write /{file.name} in {DETIGNORE}",
        code="secret",
    )


def _secret_text(path: Path) -> tuple[str, int] | None:
    try:
        content = path.read_bytes()
    except OSError:
        return None
    found = secret_text(content)
    return None if found is None else (found[0], content.count(b"\n", 0, found[1]) + 1)
