"""Options by other names are taken with underscores, and said by their right name else."""

from __future__ import annotations

import contextlib

import click
import pytest
from click.testing import CliRunner

from determined_ds.cli.main import main
from determined_ds.config.aliases import OPTIONS

COMMANDS: dict[str, click.Command] = main.commands


@pytest.mark.parametrize("command", COMMANDS)
def test_every_option_is_taken_with_underscores(command: str) -> None:
    context = click.Context(main)
    context.token_normalize_func = main.context_settings["token_normalize_func"]
    for option in (name for parameter in COMMANDS[command].params for name in parameter.opts):
        if option.startswith("--") and "-" in option[2:]:
            words = ["--" + option[2:].replace("-", "_"), "1"]
            parser = COMMANDS[command].make_parser(context)
            with contextlib.suppress(click.BadOptionUsage):  # a switch takes no value
                parser.parse_args(words)


def said(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    return result.stderr


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("run", "x.yaml", "--num_gpus", "2"), "Write --slots"),
        (("run", "x.yaml", "--gpus", "2"), "Write --slots"),
        (("generate", "--num-gpus", "2"), "Write --gpus"),
        (("generate", "--slots", "2"), "Write --gpus"),
        (("run", "x.yaml", "--zero_stage", "2"), "Write --set hyperparameters.zero_stage=VALUE"),
        (("run", "x.yaml", "--batch-size", "2"), "Write --set hyperparameters.global_batch_size=VALUE"),
        (("generate", "--batch_size", "2"), "Write --global-batch-size"),
        (("estimate", "--model_size", "6B"), "Write --params"),
        (("generate", "--params", "6B"), "Write --model-size"),
        (("check", "x.yaml", "--learning-rate", "1"), "Write --set hyperparameters.learning_rate=VALUE"),
        (("run", "x.yaml", "--model-size", "6B"), "Write --set hyperparameters.model_size=VALUE"),
        (("run", "x.yaml", "--output_dir", "x"), "Write --run-dir"),
    ],
)  # fmt: skip
def test_another_name_is_answered_with_the_right_one(words: tuple[str, ...], instead: str) -> None:
    assert f"{instead}.\n" in said(*words)


def test_an_unknown_option_is_answered_as_ever() -> None:
    message = said("run", "x.yaml", "--sloots", "2")
    assert "No such option" in message
    assert "'--slots'" in message


def test_the_table_names_options_that_there_are() -> None:
    there = {name for command in COMMANDS.values() for parameter in command.params for name in parameter.opts}
    for option, (candidates, key) in OPTIONS.items():
        assert set(candidates) <= there, option
        assert candidates or key
