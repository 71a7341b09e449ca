"""DeepSpeed JSONs by themselves: judged and loaded without the experiment that names them, and one to begin with.

There are no rules of their own: a JSON is handed to ``reconcile``, so that it refuses exactly what a run would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from determined_ds.config.ds_schema import ZERO, located_problems, normalized
from determined_ds.config.layout import BATCH_KEYS, assumed_cuda
from determined_ds.config.params import AUTO
from determined_ds.config.resolve import reconcile
from determined_ds.documents.document import Document, KeyPath
from determined_ds.documents.files import read_json
from determined_ds.errors import ConfigError, Problem


def first_json(zero: dict[str, Any], **sections: Any) -> dict[str, Any]:
    """A DeepSpeed JSON whose batch, optimizer and precision an experiment fills in.

    Args:
        zero: ``zero_optimization``.
        sections: Other sections, over those; of any that is None nothing is written.
    """
    of_adam = dict.fromkeys(("lr", "betas", "eps", "weight_decay"), AUTO)
    made = {
        **dict.fromkeys(BATCH_KEYS, AUTO),
        ZERO: zero,
        "optimizer": {"type": "AdamW", "params": of_adam},
        "scheduler": None,
        "gradient_clipping": AUTO,
        "bf16": {"enabled": AUTO},
        **sections,
    }
    return {key: value for key, value in made.items() if value is not None}


def problems_alone(ds: Document) -> tuple[list[Problem], list[Problem]]:
    """What is wrong with a DeepSpeed JSON in every experiment that could name it.

    It is judged by ``reconcile``, on GPUs of every ability, as many as its own batch or ZeRO++ asks for.

    Returns:
        Errors, and warnings.
    """
    places: list[KeyPath] = [*((key,) for key in BATCH_KEYS), (ZERO, "zero_hpz_partition_size")]
    numbers = (ds.get(path) for path in places)
    total, micro, steps, hpz = (n if type(n) is int and 0 < n < 2**31 else None for n in numbers)
    slots, of_slot = min(hpz or 1, 2**16), (micro or 1) * (steps or 1)
    if total and (micro or steps):
        slots = max(1, total // of_slot) if micro and steps else 1
    batch = {} if total else {"global_batch_size": of_slot * slots}
    given = Document(name="hyperparameters", data=batch, prefix="hyperparameters")
    try:
        return [], [*reconcile(given, ds, slots=slots, accelerator=assumed_cuda(slots)).warnings]
    except ConfigError as error:  # what nothing determines yet, a hyperparameter of the experiment will
        return [problem for problem in error.problems if problem.code != "auto-undetermined"], []


def load_deepspeed_config(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON, and refuse what DeepSpeed would not read in it.

    Args:
        path: Of the file. Only JSON: no comments, no commas at the end.

    Returns:
        A plain dict, ``"auto"`` where the file says so. Whole floats are integers where DeepSpeed takes
        integers (``5e8``).

    Raises:
        ConfigError: the file cannot be read, or is not JSON, or repeats a key, or has one that DeepSpeed does not
            know, reads as another type, or has renamed; all of them, each with its line.
    """
    document = read_json(Path(path))
    if problems := [problem for _, problem in located_problems(document)]:
        raise ConfigError(problems)
    return normalized(document).data
