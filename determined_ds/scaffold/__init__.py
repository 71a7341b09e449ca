"""The files of a new model and its experiment, which run as they are: what ``det-ds new`` writes.

They come from the templates beside this file, one folder a kind, or are a copy of an example.
"""

from __future__ import annotations

import json
import keyword
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path
from string import Template

from determined_ds.config.resolve import first_json
from determined_ds.documents.document import one_of
from determined_ds.errors import ConfigError, Problem
from determined_ds.experiment.source import Source

TEMPLATES = Path(__file__).parent
# A checkout, or site-packages: model_defs lies beside this package; and where a wheel puts the experiments.
ROOT, INSTALLED = TEMPLATES.parents[1], Path(sysconfig.get_path("data"), "share", "determined-ds")
PACKAGE = "model_defs/__init__.py"
# What a cluster is not sent: runs, with their checkpoints.
IGNORED = {".detignore": "runs/\n"}
JSON = re.compile(r"experiments/deepspeed/[\w.-]+\.json")


@dataclass(frozen=True, kw_only=True)
class NewFiles:
    """Path in the context directory -> text.

    Args:
        own: Files of the new model.
        shared: Files that other models use too; one that exists is kept.
    """

    own: dict[str, str]
    shared: dict[str, str]


def files_of(name: str, kind: str) -> NewFiles:
    """The files of a new model, from the templates.

    Args:
        name: Of the folder in ``model_defs``, a Python name; the class is named after it.
        kind: ``data-parallel``, ``pipeline`` or ``two-engine``.

    Raises:
        ConfigError: the name is not a valid package name.
    """
    _check_name(name)
    words = {"name": name, "class_name": "".join(part.capitalize() for part in name.split("_"))}
    own = {f"model_defs/{name}/__init__.py": ""}
    texts = {text.name: text for of in ("common", kind) for text in sorted((TEMPLATES / of).glob("*.txt"))}
    for text in texts.values():
        folder = f"experiments/{name}" if ".yaml" in text.name else f"model_defs/{name}"
        content = Template(text.read_text(encoding="utf-8")).substitute(words)
        own[f"{folder}/{text.name.removesuffix('.txt')}"] = content
    pipeline = kind == "pipeline"
    first = json.dumps(first_json({"stage": 0 if pipeline else 1}), indent=2) + "\n"
    path = f"experiments/deepspeed/{'pipeline' if pipeline else 'zero1'}.json"
    return NewFiles(own=own, shared={PACKAGE: "", **IGNORED, path: first})


def copy_of(model: str, name: str) -> NewFiles:
    """An example model under another name: its code, what that imports, its experiments and their JSONs.

    Args:
        model: A folder of ``model_defs`` with a trial or a script.
        name: Of the copy.

    Raises:
        ConfigError: there is no such model, or the name is not valid.
    """
    _check_name(name)
    code, configs = ROOT / "model_defs", ROOT if (ROOT / "experiments/deepspeed").is_dir() else INSTALLED
    mains = [file for main in ("trial.py", "train.py") for file in code.glob(f"*/{main}")]
    models = sorted(
        file.parent.name for file in mains if (configs / "experiments" / file.parent.name).is_dir()
    )
    if model not in models:
        message, fix = "no such model, with its experiments", one_of(models, model)
        raise ConfigError(Problem(key="--from", value=model, message=message, fix=fix, code="model"))
    own: dict[str, str] = {}
    for parent, folder in (("model_defs", code / model), ("experiments", configs / "experiments" / model)):
        for file in sorted([*folder.glob("*.py"), *folder.glob("*.yaml")]):
            text = file.read_text(encoding="utf-8")
            if (
                file.suffix == ".py" or f"model_defs.{model}." in text
            ):  # else an experiment of another model's trial
                own[f"{parent}/{name}/{file.name}"] = _renamed(text, model, name)
    shared = {PACKAGE: "", **IGNORED, **_imported(model)}
    for path in sorted({path for text in own.values() for path in JSON.findall(text)}):
        shared[path] = (configs / path).read_text(encoding="utf-8")
    return NewFiles(own=own, shared=shared)


def _renamed(text: str, model: str, name: str) -> str:
    """The text of a file with the model's modules, paths, experiment names and label under another name."""
    text = re.sub(rf"\b(model_defs|experiments)([./]){model}\b", rf"\1\g<2>{name}", text)
    text = re.sub(rf"^(name: ){model}(?=_|$)", rf"\1{name}", text, flags=re.MULTILINE)
    return re.sub(rf"^(labels: \[){model}\b", rf"\1{name}", text, flags=re.MULTILINE)


def _imported(model: str) -> dict[str, str]:
    """The files of ``model_defs`` outside a model that it imports, directly or through another."""
    found: dict[str, str] = {}
    todo = sorted((ROOT / "model_defs" / model).glob("*.py"))
    while todo:
        for module in sorted(Source(todo.pop()).modules):
            *folders, last = module.split(".")
            path = "/".join([*folders, f"{last}.py"])
            is_other = folders[:1] == ["model_defs"] and folders != ["model_defs", model]
            if not is_other or path in found or not (ROOT / path).is_file():
                continue
            for file in (path, "/".join([*folders, "__init__.py"])):
                found[file] = (ROOT / file).read_text(encoding="utf-8")
            todo.append(ROOT / path)
    return dict(sorted(found.items()))


def _check_name(name: str) -> None:
    """Refuse what is not a valid package name."""
    if re.fullmatch("[a-z][a-z0-9_]*", name) and not keyword.iskeyword(name):
        return
    message = "is not a valid package name: it must be lower-case letters, digits and _, a letter first"
    raise ConfigError(Problem(key="NAME", value=name, message=message, fix="use e.g. my_model", code="name"))
