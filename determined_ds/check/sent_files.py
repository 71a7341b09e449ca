"""The context directory: what of the files that ``det experiment create`` would send looks secret, or is a run.

Source: ``os_walk_to_v1Files`` in determined 0.38.1's ``common/detignore.py``, whose choice of files is repeated here
without loading Determined.
"""

from __future__ import annotations

import contextlib
import os
import re
import warnings
from pathlib import Path

from determined_ds.documents.document import words
from determined_ds.errors import Origin, Problem
from determined_ds.experiment.secrets import secret_text

DETIGNORE, OF_A_RUN = ".detignore", "launches.jsonl"  # which every run directory has
# ``DEFAULT_DETIGNORE`` in determined 0.38.1's ``common/constants.py``.
IGNORED_BY_DEFAULT = words("""__pycache__/ *.py[co] *$py.class terraform terraform_data terraform.tfstate*
    terraform.tfvars* .terraform* .git/ .vscode/ .idea/ .mypy_cache/ /shared_fs""")
MAX_SEARCHED_BYTES = 2**20  # a secret is a line of a small file
SECRET_NAMES = re.compile(
    r"id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|jks|keystore)|\.env(\..+)?|\.netrc|\.pypirc|\.npmrc"
    r"|\.htpasswd|kubeconfig|credentials(\.(json|ya?ml|ini|txt))?|secrets?\.(json|ya?ml|toml|ini|txt)"
    r"|service[-_]account.*\.json",
    re.IGNORECASE,
)


def context_problems(context_dir: Path) -> tuple[list[Problem], list[Problem]]:
    """Errors of the files that would be sent; and warnings of secrets, of runs, and of links to folders."""
    from pathspec import PathSpec  # late: not every command needs it

    lines, warned = [*IGNORED_BY_DEFAULT], list[Problem]()
    with_runs: set[str] = set()

    def problem(name: str, message: str, fix: str, code: str, line: int = 0) -> Problem:
        shown = str(context_dir / name)
        origin = Origin(f"{shown}:{line}" if line else shown, file=shown, line=line, column=bool(line))
        return Problem(key="context directory", origin=origin, message=message, fix=fix, code=code)

    with contextlib.suppress(OSError):
        lines += (context_dir / DETIGNORE).read_text(encoding="utf-8", errors="replace").splitlines()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Determined uses this kind of patterns
            ignored = PathSpec.from_lines("gitwildmatch", lines).match_file
    except ValueError as error:
        fix = "correct the line, or remove it"
        return [problem(DETIGNORE, f"det stops at it: {error}", fix, "detignore")], []
    for parent, folders, files in os.walk(context_dir):
        below = Path(parent).relative_to(context_dir).as_posix()
        prefix = "" if below == "." else f"{below}/"
        folders[:] = sorted(
            each for each in folders if not (ignored(prefix + each) or ignored(f"{prefix}{each}/"))
        )
        if prefix and OF_A_RUN in files:  # a run: its links are seen with it
            top = prefix.partition("/")[0]
            folders[:] = [each for each in folders if not Path(parent, each).is_symlink()]
            if top not in with_runs:
                message = f"{top} holds runs of det-ds, and would be sent with their checkpoints"
                warned.append(problem(top, message, f"write {top}/ in {DETIGNORE}", "context-run"))
            with_runs.add(top)
        for name in [prefix + each for each in folders if Path(parent, each).is_symlink()]:
            message = f"{name} is a link to a folder, and would be sent as an empty one"
            fix = f"copy what it leads to if that is needed, or write /{name} in {DETIGNORE}"
            warned.append(problem(name, message, fix, "context-link"))
        for name in sorted(prefix + each for each in files):
            path = context_dir / name
            if path.name == DETIGNORE or ignored(name) or not path.exists():  # det skips a broken link
                continue
            found, line = "", 1
            if SECRET_NAMES.fullmatch(path.name):
                found = "its name is typical of secrets"
            elif path.stat().st_size <= MAX_SEARCHED_BYTES:
                with contextlib.suppress(OSError):
                    content = path.read_bytes()
                    if secret := secret_text(content):
                        found = f"contains what looks like {secret[0]}"
                        line = content.count(b"\n", 0, secret[1]) + 1
            if found:
                fix = f"keep it out of the context directory, or write /{name} in {DETIGNORE}"
                message = f"{name} would be sent to the cluster, and {found}"
                warned.append(problem(name, message, fix, "secret", line))
    return [], warned
