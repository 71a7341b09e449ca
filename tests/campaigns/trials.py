"""A working trial with random mistakes in its source, under ``det-ds run --test``: no traceback of ours."""

from __future__ import annotations

import ast
import random
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from tests.campaigns.case import Case
from tests.command import ROOT, det_ds

OWN_MODEL = ROOT / "tests" / "cli" / "own_model"
# What an author may write in place of an expression.
STRANGE = (
    "None", "0", "1.5", "'text'", "[]", "{}", "()", "object()", "(1, 2)", "lambda *a: None", "float('nan')", "True",
    "__import__('torch').zeros(3)", "__import__('torch').zeros(())", "__import__('threading').Lock()", "undefined",
    "1 / 0", "exit(7)", "iter([])", "{'loss': None}", "int", "range(3)",
)  # fmt: skip
FRAME = re.compile(r'File "([^"]+)", line \d+')


def mutated_trials(count: int, draw: random.Random, folder: Path) -> Iterator[Case]:
    """Replace or remove one part of the trial's source at a time."""
    source = (OWN_MODEL / "trial.py").read_text()
    for number in range(count):
        context = folder / f"context{number}"
        shutil.copytree(OWN_MODEL, context)
        changed, what = mutated(source, draw)
        (context / "trial.py").write_text(changed)
        words = ("run", context / "experiment.yaml", context, "--test", "--run-dir", context / "run")
        done = det_ds(*words, "--slots", "1")
        yield Case(name=what, failures=complaints(done.returncode, done.stderr, context))
        shutil.rmtree(context)


def mutated(source: str, draw: random.Random) -> tuple[str, str]:
    """The source with one mistake, and what it is."""
    tree = ast.parse(source)
    if draw.random() < 0.6:
        places = [
            node for node in ast.walk(tree) if isinstance(node, (ast.Return, ast.Assign)) and node.value
        ]
        place = draw.choice(places)
        strange = draw.choice(STRANGE)
        was = ast.unparse(place)
        place.value = ast.parse(strange, mode="eval").body
        return ast.unparse(ast.fix_missing_locations(tree)), f"{was!r} -> {ast.unparse(place)!r}"
    bodies = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))]
    body = draw.choice(bodies)
    at = draw.randrange(len(body.body))
    was = ast.unparse(body.body[at]).splitlines()[0]
    if draw.random() < 0.5:
        body.body[at] = ast.Pass()
        what = f"without {was!r}"
    else:
        strange = draw.choice(STRANGE)
        body.body.insert(
            at, ast.parse(f"return {strange}" if isinstance(body, ast.FunctionDef) else strange).body[0]
        )
        what = f"{strange} before {was!r}"
    return ast.unparse(ast.fix_missing_locations(tree)), what


def complaints(code: int, stderr: str, context: Path) -> list[str]:
    """What is wrong with how it ended."""
    if code == 0:
        return [] if "Traceback" not in stderr else [f"passed, with a traceback: {stderr[-2000:]}"]
    failures = [] if code in (1, 2) else [f"exit code {code}"]
    if not stderr.strip():
        failures.append("failed without a word")
    for part in stderr.split("Traceback (most recent call last)")[1:]:
        first = FRAME.search(part)
        if first is None or not Path(first[1]).is_relative_to(context):
            failures.append(f"a traceback that does not start at the author's line: {part[-1500:]}")
    return failures
