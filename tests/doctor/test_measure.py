"""``det-ds doctor --measure`` measures matrix products and collectives by size, prints them, and refuses mistakes."""

from __future__ import annotations

import json

import pytest

from tests.harness.command import det_ds


def test_products_and_collectives_are_measured_between_two_ranks() -> None:
    done = det_ds("doctor", "--measure", "--seconds", "1", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["ranks"], found["machines"], found["backend"]) == (2, 1, "gloo")
    assert found["peaks"].keys() == {"fp32", "bf16"}
    names = ["all_reduce", "reduce_scatter", "all_gather", "all_to_all", "broadcast", "send_recv"]
    assert [*found["collectives"]] == names
    for points in found["collectives"].values():
        assert points[0]["bytes"] == 1024
        assert all(0 < each["low_s"] <= each["s"] <= each["high_s"] for each in points)
    reduced = found["collectives"]["all_reduce"][0]
    assert reduced["bytes_per_s"] == pytest.approx(
        reduced["bytes"] / reduced["s"]
    )  # 2 (n - 1) / n of two ranks


def test_a_table_shows_them() -> None:
    done = det_ds("doctor", "--measure", "--seconds", "1")
    assert done.returncode == 0, done.stderr
    assert "2 ranks on 1 machine" in done.stdout
    assert "matrix products of a rank, while all compute: fp32" in done.stdout
    assert "gloo, float32: GB/s of bus bandwidth" in done.stdout
    assert "broadcast" in done.stdout
    assert "1 KiB" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "--slots", "100000"], "--slots = 100000: this machine has"),
        (["--measure", "experiments/gpt2/const.yaml"], "leave CONFIG out"),
        (["--slots", "2"], "--slots is for --measure"),
    ],
)
def test_mistakes_are_named_before_anything_starts(words: list[str], message: str) -> None:
    done = det_ds("doctor", *words)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
