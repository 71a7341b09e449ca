"""The ported scripts as they were before: what fewer than ten lines of each port were."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

SCRIPTS = Path(__file__).parent / "scripts"
# Line of the port -> the line that it was; None: there was none.
COMMON: dict[str, str | None] = {"import determined_ds": None, "    s.checkpoint(engine)": None}
CHANGED: dict[str, Mapping[str, str | None]] = {
    "cifar10": COMMON
    | {
        "def main(args, s):": "def main(args):",
        "    trainloader = s.loader(trainset)": None,
        '            s.report({"loss": loss})': None,
        '        s.report({"accuracy": accuracy}, validation=True)': None,
        '    with determined_ds.session("cifar10.yaml") as s:': None,
        "        main(get_arguments(), s)": "    main(get_arguments())",
    },
    "alexnet": COMMON
    | {
        "def train_pipe(args, s):": "def train_pipe(args):",
        "    s.loader(trainset)": None,
        "    for batches in s.steps(args.steps):": "    for _ in range(args.steps):",
        "        loss = engine.train_batch(data_iter=batches)": "        loss = engine.train_batch()",
        '        s.report({"loss": loss})': None,
        '    with determined_ds.session("alexnet.yaml") as s:': "    deepspeed.init_distributed()",
        "        train_pipe(get_arguments(), s)": "    train_pipe(get_arguments())",
    },
}


def as_it_was(name: str, folder: Path) -> Path:
    """Write the script as it was before the port. Returns its file."""
    changed, lines = dict(CHANGED[name]), (SCRIPTS / f"{name}_ported.py").read_text().splitlines()
    assert len(changed) < 10
    assert set(changed) <= set(lines)
    kept = [changed.get(line, line) for line in lines]
    file = folder / f"{name}_plain.py"
    file.write_text("\n".join(line for line in kept if line is not None) + "\n")
    return file
