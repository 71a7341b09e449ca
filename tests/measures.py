"""``make measures``: how large, how layered and how documented the code is, beside what is wanted of it.

Exits with 1 where a figure is not as wanted.
"""

from __future__ import annotations

import ast
import collections
import importlib
import inspect
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import grimp

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "determined_ds"
SHOWN = 12  # names after a figure
# A batch size that no other number of a configuration is.
BATCH_SIZE = 3 * 2**20


class Measure(NamedTuple):
    """A figure.

    Args:
        name: What is measured.
        found: The figure.
        most: The largest that is wanted; None: it is only shown.
        names: What exceeds it, or makes it up.
    """

    name: str
    found: float
    most: float | None = None
    names: Sequence[str] = ()

    @property
    def is_missed(self) -> bool:
        """Whether it is not as wanted."""
        return self.most is not None and self.found > self.most


# --- Size ----------------------------------------------------------------------------------------------


def sources(folder: str) -> Iterator[tuple[Path, str]]:
    """The Python files below a folder, with their text."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.relative_to(ROOT), path.read_text()


def functions(folder: str) -> list[tuple[int, str]]:
    """Lines and name of every function and method, the longest first."""
    found = []
    for path, text in sources(folder):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.append(((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.name}"))
    return sorted(found, reverse=True)


def sizes() -> Iterator[Measure]:
    """Lines, files and functions."""
    for folder, most_lines in ((PACKAGE, 20_000), ("model_defs", None), ("tests", 22_000)):
        lengths = [(text.count("\n"), str(path)) for path, text in sources(folder)]
        yield Measure(f"lines of {folder}", sum(lines for lines, _ in lengths), most_lines)
        long = [f"{path} {lines}" for lines, path in sorted(lengths, reverse=True) if lines > 400]
        yield Measure(f"files of {folder}", len(lengths))
        yield Measure(f"files of {folder} over 400 lines", len(long), None, long)
    found = functions(PACKAGE)
    yield Measure("median of a function's lines", statistics.median(lines for lines, _ in found), 7)
    over = [f"{name} {lines}" for lines, name in found if lines > 60]
    yield Measure("functions over 60 lines", len(over), 0, over or [f"{found[0][1]} {found[0][0]}"])


# --- Names ---------------------------------------------------------------------------------------------

# What users import in place of another library's, by the same name, beside ours of that name.
DROP_IN = ("determined_ds/deepspeed.py",)
DROP_IN_CLASSES = ("Trainer",)


def names() -> Iterator[Measure]:
    """Files and classes that one may take for one another. The files of ``cli`` have the names of commands."""
    stems = collections.defaultdict(list)
    classes = collections.defaultdict(list)
    for path, text in sources(PACKAGE):
        if not path.stem.startswith("__") and path.parts[1] != "cli" and str(path) not in DROP_IN:
            stems[path.stem].append(str(path))
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                classes[node.name].append(str(path))
    alike = [" and ".join(paths) for paths in stems.values() if len(paths) > 1]
    for stem in stems:
        alike += [
            f"{stems[stem][0]} and {stems[other][0]}"
            for other in stems
            if other != stem and len(stem) > 3 and other.startswith(stem)
        ]
    yield Measure("files whose names differ by a suffix or not at all", len(alike), 0, alike)
    twice = [
        f"{name} in {' and '.join(paths)}"
        for name, paths in classes.items()
        if len(paths) > 1 and name not in DROP_IN_CLASSES
    ]
    yield Measure("class names used twice", len(twice), 0, twice)


# --- Layers --------------------------------------------------------------------------------------------


def layers() -> Iterator[Measure]:
    """Cycles between modules, and imports against the order of the rooms in pyproject.toml."""
    graph = grimp.build_graph(PACKAGE, exclude_type_checking_imports=True)
    cycles = _cycles({module: graph.find_modules_directly_imported_by(module) for module in graph.modules})
    yield Measure("cycles of modules", len(cycles), 0, [" <-> ".join(cycle) for cycle in cycles])
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [rooms] = [contract["layers"] for contract in contracts if contract["id"] == "one-way"]
    order = {
        room.strip(" ()"): height for height, line in enumerate(reversed(rooms)) for room in line.split("|")
    }
    upward = []
    for module in sorted(graph.modules):
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            own, other = (order.get(".".join(name.split(".")[:2])) for name in (module, imported))
            if own is not None and other is not None and own < other:
                upward.append(f"{module} imports {imported}")
    yield Measure("imports upward", len(upward), 0, upward)


def _cycles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Modules that import one another, by repeatedly leaving out those that take no part."""
    left = {module: set(imported) for module, imported in imports.items()}
    while ends := [m for m, imported in left.items() if not imported & left.keys()]:
        for module in ends:
            del left[module]
    reached: dict[str, set[str]] = {}
    for module in left:
        todo, seen = [module], set()
        while todo:
            new = (imports[todo.pop()] & left.keys()) - seen
            seen |= new
            todo += new
        reached[module] = seen
    groups = {
        tuple(sorted(m for m in reached[module] if module in reached[m]))
        for module in left
        if module in reached[module]
    }
    return [list(group) for group in sorted(groups)]


# --- The way of a value ----------------------------------------------------------------------------------


def walk() -> Iterator[Measure]:
    """The rooms whose functions are given ``global_batch_size``, or return it, while an experiment is decided.

    ``documents`` holds the values that all others read, so it counts only up to where the first other room begins.
    """
    from determined_ds.config.accelerator import Accelerator
    from determined_ds.config.resolve import Where
    from determined_ds.experiment.decide import decide, read_document
    from determined_ds.experiment.experiment import parse_experiment

    visited: list[str] = []

    def look(frame: FrameType, event: str, returned: Any) -> None:
        module = frame.f_globals.get("__name__", "")
        if not module.startswith(f"{PACKAGE}.") or event not in ("call", "return"):
            return
        values = [returned] if event == "return" else list(frame.f_locals.values())
        room = module.split(".")[1]
        if any(type(value) is int and value == BATCH_SIZE for value in values):
            if room == "documents" and visited and visited[-1] != room:
                return
            if visited[-1:] != [room]:
                visited.append(room)

    sys.setprofile(look)
    try:
        override = f"hyperparameters.global_batch_size={BATCH_SIZE}"
        path = ROOT / "experiments/gpt2/const.yaml"
        experiment = parse_experiment(read_document(path, ROOT, slots=None, overrides=[override]))
        gpus = Accelerator(name="cuda", num_devices=8, bf16=True, fp16=True)
        where = Where(context_dir=ROOT, accelerator=gpus)
        resolved = decide(experiment, experiment.hyperparameters, where, here=True)
    finally:
        sys.setprofile(None)
    assert resolved.ds_config["train_batch_size"] == BATCH_SIZE
    returns = [room for place, room in enumerate(visited) if room in visited[:place]]
    yield Measure("returns of global_batch_size to a room", len(returns), 0, [" -> ".join(visited)])


# --- Documentation ---------------------------------------------------------------------------------------


def documented() -> Iterator[Measure]:
    """Exported functions and public methods of exported classes that lack a section which their signature asks for."""
    package = importlib.import_module(PACKAGE)
    lacking, count = [], 0
    for name in package.__all__:
        value = getattr(package, name)
        if not getattr(value, "__module__", "").startswith(PACKAGE):
            continue
        callables: dict[str, Callable[..., Any]] = {name: value} if inspect.isfunction(value) else {}
        if inspect.isclass(value):
            callables = {
                f"{name}.{each}": method
                for each, method in vars(value).items()
                if inspect.isfunction(method) and not each.startswith("_")
            }
        for label, function in callables.items():
            count += 1
            lacking += [label] if _lacks(function) else []
    yield Measure("exported functions and methods", count)
    yield Measure("of them without Args or Returns", len(lacking), round(count / 10), lacking)


def _lacks(function: Callable[..., Any]) -> bool:
    doc = inspect.getdoc(function) or ""
    signature = inspect.signature(function)
    takes = [name for name in signature.parameters if name not in ("self", "cls")]
    gives = signature.return_annotation not in (None, "None", inspect.Signature.empty)
    return (bool(takes) and "Args:" not in doc) or (gives and "eturns" not in doc)


# --- Time ------------------------------------------------------------------------------------------------


def times() -> Iterator[Measure]:
    """CPU time of the shortest of several starts, less that of Python itself."""
    bare = _cpu_ms("pass")
    for name, code, most_ms in (
        ("import determined_ds", f"import {PACKAGE}", 30),
        ("det-ds --help", f"from {PACKAGE}.cli.main import main; main(['--help'])", 400),
    ):
        yield Measure(f"{name}, ms of a core", round(_cpu_ms(code) - bare), most_ms)


def _cpu_ms(code: str) -> float:
    found = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.DEVNULL, check=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append((after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime) * 1000)
    return min(found)


def main() -> int:
    """Print every measure. Returns the exit code."""
    missed = 0
    for measure in (m for part in (sizes, names, layers, walk, documented, times) for m in part()):
        wanted = "" if measure.most is None else f"at most {measure.most:,g}"
        print(
            f"{measure.name:52} {measure.found:9,g}  {wanted:15} {'MISSED' if measure.is_missed else ''}".rstrip()
        )
        for name in measure.names[:SHOWN]:
            print(f"    {name}")
        if len(measure.names) > SHOWN:
            print(f"    and {len(measure.names) - SHOWN} more")
        missed += measure.is_missed
    print(f"{missed} missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
