"""How a pipeline's layers are shared out, on the page of its run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from determined_ds.pipe.orders import Pipeline
from determined_ds.protocol.layer_shares import Partition
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.layer_bars import partition_picture
from determined_ds.report.layer_section import partition_section, write_partition_picture
from determined_ds.report.rank_bars import MOST_RANKS
from determined_ds.report.runs.runs_page import runs_page
from tests.report.making import SHARED_OUT, layer
from tests.report.recorded import course, recorded, shown
from tests.report.test_page import EVIL, Page

pytest.importorskip("matplotlib")


def texts(found: Partition) -> list[str]:
    figure = partition_picture(found)
    assert figure is not None
    return [text.get_text() for panel in figure.axes for text in panel.texts]


def test_a_bar_a_rank_has_the_layers_and_the_milliseconds() -> None:
    """By parameters three layers each, of 22 and 50 ms; by their times four and two, of 32 and 40."""
    assert texts(SHARED_OUT) == ["2", "2", "1", "22.0", "50.0", "3", "1", "1", "32.0", "40.0"]


def test_a_rank_of_several_parts_has_them_in_one_bar() -> None:
    pipe = Pipeline(schedule="dualpipev", ranks=2, micro_batches=8, chunks=2)
    folded = replace(SHARED_OUT, pipe=pipe, bounds=(0, 1, 3, 5, 6), by_parameters=(0, 1, 2, 4, 6))
    assert texts(folded)[-2:] == ["32.0", "40.0"]


def test_more_ranks_than_bars_are_not_drawn() -> None:
    many = Pipeline(schedule="1f1b", ranks=MOST_RANKS + 1, micro_batches=8)
    assert partition_picture(replace(SHARED_OUT, pipe=many)) is None


def test_the_page_of_a_run_shows_it(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", course(4))
    assert partition_section(path, "it") is None
    assert "How layers are shared out" not in Page(runs_page([shown(path)])).texts["h2"]

    evil = (layer(EVIL, 0.002), *SHARED_OUT.layers[1:])
    RunDir(path).partition.write_text(replace(SHARED_OUT, layers=evil).text())
    page = Page(runs_page([shown(path)]))
    assert "How layers are shared out" in page.texts["h2"]
    words = "4+2 layers by their measured times; a micro-batch takes 40.0 ms on the slowest rank, and 50.0 ms"
    assert any(words in text for text in page.texts["p"])

    RunDir(path).partition.write_text("{")
    assert partition_section(path, "it") is None


def test_a_run_has_the_picture_as_a_file(tmp_path: Path) -> None:
    there = RunDir(tmp_path)
    assert not write_partition_picture(tmp_path)
    there.partition.write_text(SHARED_OUT.text())
    assert write_partition_picture(tmp_path)
    assert there.partition_picture.read_bytes()[:4] == b"\x89PNG"
