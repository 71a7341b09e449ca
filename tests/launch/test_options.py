"""The options of ``det-ds run`` are listed once: the command line, what it is parsed to, and back to words."""

from __future__ import annotations

from pathlib import Path

from determined_ds.cli.run import run
from determined_ds.launch.options import RunOptions

WORDS = [
    "a.yaml",
    "model",
    "--slots",
    "4",
    "--test",
    "--set",
    "a=1",
    "--set",
    "b.c=x y",
    "--run-dir",
    "runs/a b",
]
WORDS += [
    "--resume",
    "--storage",
    "--accelerator",
    "cpu",
    "--hang-timeout",
    "2.5",
    "--measure",
    "7",
    "--engine",
    "ddp",
]


def parsed(words: list[str]) -> RunOptions:
    return RunOptions(**run.make_context("run", list(words)).params)


def test_words_that_are_parsed_are_the_same_words() -> None:
    options = parsed(WORDS)
    assert options.words() == ["run", *WORDS]
    assert options.words(without=("slots", "hostfile")) == ["run", *WORDS[:2], *WORDS[4:]]
    assert options.overrides == ("a=1", "b.c=x y")
    assert (options.slots, options.stated_slots, options.is_measured) == (4, 4, True)
    assert options.train_arguments == [
        *("--test", "--engine", "ddp", "--measure", "7", "--warmup", "5", "--storage")
    ]


def test_without_options_each_has_its_default() -> None:
    assert parsed(["a.yaml"]) == RunOptions(config=Path("a.yaml"))
    assert parsed(["a.yaml", "--slots", "auto"]).stated_slots is None
    assert RunOptions(config=Path("a.yaml")).train_arguments == []
