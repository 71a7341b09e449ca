"""NAME and an example model -> a copy of it: its code, what that imports, its experiments and their JSONs."""

from __future__ import annotations

import re
import sysconfig
from pathlib import Path

from determined_ds.documents.document import nearest
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.source import Source
from determined_ds.scaffold.templates import PACKAGE, NewFiles, check_name

# A checkout, or site-packages: model_defs lies beside this package.
ROOT = Path(__file__).resolve().parents[2]
# Where a wheel puts the experiments (see setup.cfg).
INSTALLED = Path(sysconfig.get_path("data"), "share", "determined-ds")
PACKAGES = "model_defs"
MAINS = ("trial.py", "train.py")  # what an experiment runs: a trial or a script
JSON = re.compile(r"experiments/deepspeed/[\w.-]+\.json")


def copy_of(model: str, name: str) -> NewFiles:
    """The files of an example model under another name.

    Args:
        model: A folder of ``model_defs`` with a trial or a script.
        name: Of the copy.

    Raises:
        ConfigError: there is no such model, its experiments are not installed, or the name is not valid.
    """
    check_name(name)
    code = ROOT / PACKAGES / model
    models = sorted(file.parent.name for main in MAINS for file in (ROOT / PACKAGES).glob(f"*/{main}"))
    if model not in models:
        close = nearest(model, models)
        fix = f"did you mean {close}?" if close else f"use one of {', '.join(models)}"
        raise ConfigError(Problem(key="--from", value=model, message="no such model", fix=fix, code="model"))
    configs = next(
        (each / "experiments" for each in (ROOT, INSTALLED) if (each / "experiments" / model).is_dir()), None
    )
    if configs is None:
        message, fix = "its experiments are not installed", "run det-ds new from a checkout of determined_ds"
        raise ConfigError(Problem(key="--from", value=model, message=message, fix=fix, code="model"))
    own: dict[str, str] = {}
    for kind, folder in (("py", code), ("yaml", configs / model)):
        parent = PACKAGES if kind == "py" else "experiments"
        for file in sorted(folder.glob(f"*.{kind}")):
            text = file.read_text(encoding="utf-8")
            if kind == "py" or f"{PACKAGES}.{model}." in text:  # else an experiment of another model's trial
                own[f"{parent}/{name}/{file.name}"] = _renamed(text, model, name)
    shared = {PACKAGE: ""} | _imported(model)
    for path in sorted({path for text in own.values() for path in JSON.findall(text)}):
        shared[path] = (configs.parent / path).read_text(encoding="utf-8")
    return NewFiles(own=own, shared=shared)


def _renamed(text: str, model: str, name: str) -> str:
    """The text of a file with the model's modules, paths, experiment names and label under another name."""
    text = re.sub(rf"\b({PACKAGES}|experiments)([./]){model}\b", rf"\1\g<2>{name}", text)
    text = re.sub(rf"^(name: ){model}(?=_|$)", rf"\1{name}", text, flags=re.MULTILINE)
    return re.sub(rf"^(labels: \[){model}\b", rf"\1{name}", text, flags=re.MULTILINE)


def _imported(model: str) -> dict[str, str]:
    """The files of ``model_defs`` outside a model that it imports, directly or through another."""
    found: dict[str, str] = {}
    todo = sorted((ROOT / PACKAGES / model).glob("*.py"))
    while todo:
        for module in sorted(Source(todo.pop()).modules):
            *folders, last = module.split(".")
            path = "/".join([*folders, f"{last}.py"])
            is_other = folders[:1] == [PACKAGES] and folders != [PACKAGES, model]
            if not is_other or path in found or not (ROOT / path).is_file():
                continue
            for file in (path, "/".join([*folders, "__init__.py"])):
                found[file] = (ROOT / file).read_text(encoding="utf-8")
            todo.append(ROOT / path)
    return dict(sorted(found.items()))
