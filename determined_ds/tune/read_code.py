"""What the code of an experiment reads, by its text: nothing is imported or run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from determined_ds.config.strategy import SWITCHES
from determined_ds.experiment.experiment import Experiment
from determined_ds.experiment.source import Script, find_code, source_of

# Arguments of transformers that take hyperparameters.
HF_ARGUMENTS = re.compile(r"^from determined_ds\.transformers import (\([^)]*|.*)Arguments\b", re.MULTILINE)


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The text of an experiment's code in the context directory.

    Args:
        text: Of all files, one after the other.
        is_script: Whether they are of a script, which reads its hyperparameters itself.
    """

    text: str
    is_script: bool = False

    @classmethod
    def of(cls, experiment: Experiment, context_dir: Path) -> Sources:
        """The sources of a trial, and of what it imports; or those of a script.

        Args:
            experiment: Names the code.
            context_dir: The folder with the code.
        """
        script = experiment.script
        if script is None:
            return cls(text=_joined(_beside(experiment.trial, context_dir)))
        file = find_code(script, context_dir)
        found = Script(file=file, context_dir=context_dir).sources if file is not None else {}
        return cls(text=_joined(found), is_script=True)

    def reads(self, name: str) -> bool:
        """Whether a hyperparameter of this name is read: the name is in quotes, or is a field with a type."""
        return re.search(rf'["\']{name}["\']|^\s*{name}\s*:', self.text, re.MULTILINE) is not None

    @property
    def takes_bf16(self) -> bool:
        """Whether inputs are cast where the model is in bf16: this library's loop does it, a script by itself."""
        by_itself = re.search(r"\b(bf16|bfloat16|autocast)\b|\.dtype\b", self.text) is not None
        return not self.is_script or by_itself or HF_ARGUMENTS.search(self.text) is not None

    def checkpointing_key(self, *, stated: Iterable[str]) -> str | None:
        """The hyperparameter by which the model checkpoints activations; None where nothing reads one.

        Args:
            stated: The names of the hyperparameters that the experiment states.
        """
        names = set(stated)
        by_name = next((name for name in SWITCHES if name in names), None)
        return by_name or next((name for name in SWITCHES if self.reads(name)), None)


def _beside(trial: str, context_dir: Path) -> list[Path]:
    """The modules beside the trial's, and those that they import from the context directory."""
    source = source_of(trial.partition(":")[0], context_dir)
    beside = sorted(source.parent.glob("*.py")) if source else []
    imported = set(re.findall(r"^from ([\w.]+) import", _joined(beside), re.MULTILINE))
    others = (source_of(name, context_dir) for name in sorted(imported))
    return [*beside, *(file for file in others if file)]


def _joined(files: Iterable[Path]) -> str:
    return "\n".join(file.read_text(errors="replace") for file in files)
