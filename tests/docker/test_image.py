"""``docker/Dockerfile``: linted, its install that of the Makefile, and the install run, as far as a test can."""

from __future__ import annotations

import pytest

from tests.harness.command import ROOT

DOCKERFILE = ROOT / "docker/Dockerfile"
PREFIX = "/opt/determined-ds"


def steps() -> list[dict[str, str]]:
    """The instructions, continued lines joined."""
    parse = pytest.importorskip("dockerfile_parse", reason="dockerfile-parse is of the dev extra")
    parser = parse.DockerfileParser(fileobj=DOCKERFILE.open("rb"))
    found: list[dict[str, str]] = parser.structure
    return [step for step in found if step["instruction"] != "COMMENT"]


def values(instruction: str) -> list[str]:
    return [step["value"] for step in steps() if step["instruction"] == instruction]


def install() -> str:
    (command,) = (value for value in values("RUN") if "pip" in value)
    return command


def test_what_it_copies_is_let_through_and_nothing_else_is() -> None:
    copied = {word for value in values("COPY") for word in value.split()[:-1]}
    ignore = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignore if line.startswith("!")} == copied
    assert "*" in ignore
    assert all((ROOT / name).exists() for name in copied)
    assert {"model_defs", "experiments"} <= copied  # examples, for det-ds new --from
