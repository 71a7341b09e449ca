"""Mistakes that people make in a good file are each found once, on their line, with a fix that works.

Words of the file that come new with the fix stand in what it says, but for those that it leaves open.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.checked import findings
from tests.harness.command import ROOT

CONST = "experiments/gpt2/const.yaml"
# The first is that of const.yaml, which is checked then.
ZERO1 = "experiments/deepspeed/zero1.json"
Edit = tuple[str, str, str]  # file, old text, new text


class Mistake(NamedTuple):
    file: str
    right: str  # text of it that is right
    wrong: str  # what somebody wrote there instead
    fixed: str = ""  # what the fix has written instead of ``wrong``, where that is not ``right``
    edits: tuple[Edit, ...] = ()  # or in other places
    fix: str = ""  # what the fix says, where it brings no word that is new
    chosen: str = ""  # words that the fix leaves open, as ``N`` or ``NAME``
    at: str = ""  # text of the line that has to be named; by default the first of ``wrong``
    named_in: str = ""  # the file whose line is named, where that is another


MODULE = "python3 -m determined.launch.torch_distributed python3 -m determined_ds.train model_defs.gpt2.trial:GPT2Trial"
SLOTS, TOTAL = "slots_per_trial: 2", "global_batch_size: 32"
TOP = "hyperparameters:"
LENGTH = "max_length: {batches: 200}"
REPLICAS = "data_parallel_world_size: auto"
NOT_PIPED = "pipe_parallel_size: 1"
JSON_FILE = "deepspeed_config: experiments/deepspeed/zero1.json"
INLINE = "{optimizer: {type: AdamW, params: {lr: auto}}}"
TRAINING = "training: {epochs: 3}\n"
EPOCHS = ((CONST, TRAINING, ""), (CONST, LENGTH, "max_length: {epochs: 3}"))
CLIPPING, PIPELINE_OF_1 = '"gradient_clipping"', '"pipeline": {"stages": 1},'
UNSTAGED = ((ZERO1, PIPELINE_OF_1, ""), (CONST, REPLICAS, NOT_PIPED))

PLANTED = {
    # Keys
    "a section misspelt": Mistake(CONST, TOP, "hyperparamters:"),
    "the number of slots by another name": Mistake(CONST, SLOTS, "slots: 2"),
    "a key one level too high": Mistake(CONST, "reproducibility: {experiment_seed: 0}", "experiment_seed: 0"),
    "a hyperparameter at the top level": Mistake(
        CONST, TOP, f"{NOT_PIPED}\n{TOP}", f"{TOP}\n  {NOT_PIPED}", fix="hyperparameters.pipe_parallel_size"
    ),
    # Values
    "a length without its unit": Mistake(CONST, LENGTH, "max_length: 200", fix="{batches: N}"),
    # The batch and the ranks
    "a batch stated twice": Mistake(
        ZERO1, '"train_batch_size": "auto"', '"train_batch_size": 64', at=TOTAL, named_in=CONST
    ),
    # The trial
    "the form of old": Mistake(CONST, MODULE, MODULE.split()[-1]),
    "a JSON in the YAML": Mistake(
        CONST, JSON_FILE, f"deepspeed_config: {INLINE}", f"deepspeed_config: {{type: const, val: {INLINE}}}"
    ),
    # Names from other documents
    "a block for the training": Mistake(
        CONST, "max_restarts: 2\n", TRAINING, edits=EPOCHS, fix="periods below hyperparameters.fit"
    ),
    "stages in the JSON": Mistake(ZERO1, CLIPPING, f"{PIPELINE_OF_1}\n  {CLIPPING}", edits=UNSTAGED),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the templates and their models, which is the current folder; all in it checks clean."""
    for name in ("experiments", "model_defs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / ".detignore", tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write_over(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) == 1, f"{old!r} stands {text.count(old)} times in {path}"
    path.write_text(text.replace(old, new))


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text))


@pytest.mark.parametrize("mistake", PLANTED.values(), ids=PLANTED)
def test_it_is_found_once_on_its_line_and_its_fix_works(project: Path, mistake: Mistake) -> None:
    checked = CONST if mistake.file == ZERO1 else mistake.file
    assert findings(checked) == []
    write_over(project / mistake.file, mistake.right, mistake.wrong)
    named_in = mistake.named_in or mistake.file
    at = (mistake.at or mistake.wrong.splitlines()[0]).strip()
    lines = (project / named_in).read_text().splitlines()
    line = next(number for number, content in enumerate(lines, 1) if at in content)

    found = findings(checked)

    (there,) = found
    assert (there.file, there.line) == (named_in, line)
    assert mistake.fix in there.fix
    for file, old, new in mistake.edits or ((mistake.file, mistake.wrong, mistake.fixed or mistake.right),):
        unknown = words(new) - words(old) - words(mistake.wrong) - words(mistake.chosen)
        assert unknown <= words(there.fix), f"a user cannot know {unknown} from: {there.fix}"
        write_over(project / file, old, new)
    assert findings(checked) == []
