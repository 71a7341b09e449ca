"""Options are taken with underscores too, and an unknown one is answered with the nearest."""

from __future__ import annotations

from click.testing import CliRunner

from determined_ds.cli.main import main


def said(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2
    return result.stderr


def test_an_option_is_taken_with_underscores() -> None:
    assert "no such file" in said("run", "nowhere.yaml", "--run_dir", "x")


def test_the_local_rank_that_launchers_add_is_taken() -> None:
    message = said("--local_rank=1", "run", "nowhere.yaml")
    assert "no such file" in message
    assert "local" not in message


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    message = said("run", "x.yaml", "--sloots", "2")
    assert "No such option" in message
    assert "'--slots'" in message
