"""What a profile has found, on a terminal and on the page of a run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from determined_ds.profile.causes import with_findings
from determined_ds.profile.for_programs import as_json
from determined_ds.profile.memory_of_step import OWNERS, MemoryOfStep
from determined_ds.profile.operators import Operator, OperatorCosts
from determined_ds.profile.step_parts import PARTS, Profile, RankProfile, StepParts
from determined_ds.profile.waiting_calls import WaitingCall
from determined_ds.protocol.recorded_step import write_step
from determined_ds.report import profile_pictures
from determined_ds.report.profile_section import profile_section
from determined_ds.report.profile_text import profile_lines
from determined_ds.report.runs.runs_page import runs_page
from tests.report.making import OF_TWO
from tests.report.making import recorded as recorded_step
from tests.report.recorded import course, recorded, shown
from tests.report.test_page import EVIL, Page, loads

MIB = 2**20


def a_profile(module: str = "h.*.mlp", place: str = "trial.py:8") -> Profile:
    """A profile of two ranks whose texts come from outside."""
    operator = Operator(
        name="aten::mm",
        module=module,
        num_modules=4,
        phase="backward",
        seconds=0.05,
        share=0.25,
        calls=8,
        shapes="[20, 30]",
    )
    curve = {owner: [0, 0, 0] for owner in OWNERS}
    peak = dict.fromkeys(OWNERS, 0) | {"activations": 90 * MIB, "parameters": 10 * MIB}
    memory = MemoryOfStep(
        batch=3,
        at_s=[0.0, 0.1, 0.2],
        bytes_by_owner=curve | {"activations": [0, 90 * MIB, 0], "parameters": [10 * MIB] * 3},
        peak_at_s=0.1,
        peak_bytes_by_owner=peak,
        peak_phase="backward",
        peak_module=module,
        peak_modules={f"activations {module}": 60 * MIB},
    )
    seconds = dict.fromkeys(PARTS, 0.0) | {"forward": 0.1, "backward": 0.06, "communication": 0.04}
    step = StepParts(batch=3, begin_us=0, end_us=2e5, clock_s=0.2, seconds=seconds)
    call = WaitingCall(function="barrier", place=place, seconds=0.03, calls=2)
    rank = RankProfile(
        rank=0,
        trace="rank0.json.gz",
        trace_bytes=1,
        steps=[step],
        operators=OperatorCosts(costliest=[operator]),
        memory=memory,
        waiting_calls=[call],
    )
    return with_findings(Profile(ranks=[rank, replace(rank, rank=1)], num_ranks=2))


def profiled(run_dir: Path, profile: Profile) -> Path:
    """A run directory with a profile in it."""
    (run_dir / "profile").mkdir(parents=True)
    (run_dir / "profile" / "profile.json").write_text(json.dumps(as_json(profile)))
    return run_dir


def test_text_fits_eighty_columns_whatever_names_are_in_it() -> None:
    lines = profile_lines(as_json(a_profile(module="a." * 100, place=f"{'deep/' * 40}{EVIL}.py:8")))
    assert max(map(len, lines)) <= 80
    assert all(line.isprintable() for line in lines)


def test_text_says_what_to_do_what_costs_and_what_holds_memory() -> None:
    text = "\n".join(profile_lines(as_json(a_profile())))
    assert "  1. needless-sync: 30 ms, 15.0 % of a step\n" in text
    assert "try: remove it at trial.py:8" in text
    assert " 25.0 %       50 ms      8  aten::mm, backward\n" in text
    assert "h.*.mlp (4 modules) [20, 30]" in text
    assert "at most 100 MiB, 100 ms" in text
    assert " 90.0 %      90 MiB  activations\n" in text


def test_where_nothing_is_found_the_text_says_so() -> None:
    profile = replace(a_profile(), findings=())
    assert profile_lines(as_json(profile))[0] == "Nothing was found that costs more than 3 % of a step."


def test_the_page_of_a_run_has_it_and_its_texts_are_texts(tmp_path: Path) -> None:
    run = profiled(recorded(tmp_path / "run", course(3)), a_profile(module=EVIL, place=f"{EVIL}:8"))
    page = Page(runs_page([shown(run)]))
    assert "Why it is not faster" in page.texts["h2"]
    assert any(EVIL.split("&")[0] in item for item in page.texts["li"])
    assert loads(page) == []
    assert ["forward", "100", "50.0 %"] in page.rows


def test_pictures_of_several_runs_have_names_of_their_own(tmp_path: Path) -> None:
    runs = [profiled(recorded(tmp_path / name, course(3)), a_profile()) for name in ("one", "two")]
    page = runs_page([shown(path, path.name) for path in runs])
    assert page.count('class="picture"') == 6
    assert "profile0-0-" in page
    assert "profile1-0-" in page


def test_a_pipelines_step_is_drawn_across_the_page(tmp_path: Path) -> None:
    """One that cannot be read is left out."""
    run = profiled(recorded(tmp_path / "run", course(3)), a_profile())
    write_step(recorded_step(OF_TWO), run / "pipeline_step.json")
    page = runs_page([shown(run)])
    assert 'aria-label="What each rank computes when"' in page
    assert page.count('class="card across"') == 1
    (run / "pipeline_step.json").write_text("{")
    profile_file = run / "profile" / "profile.json"
    profile_file.write_text(profile_file.read_text() + "\n")
    assert "card across" not in runs_page([shown(run)])


@pytest.mark.parametrize("content", ["{", "[]", '{"findings": 3}', '{"step_s": "x"}'])
def test_a_damaged_profile_is_left_out(tmp_path: Path, content: str) -> None:
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "profile.json").write_text(content)
    assert profile_section(tmp_path, "one") is None


def test_a_new_profile_replaces_the_old_one(tmp_path: Path) -> None:
    run = profiled(tmp_path / "run", a_profile())
    first: Any = profile_section(run, "one")
    (run / "profile" / "profile.json").write_text(json.dumps(as_json(replace(a_profile(), findings=()))))
    second: Any = profile_section(run, "one")
    assert (len(first["findings"]), len(second["findings"])) == (2, 0)


def test_what_holds_little_memory_is_drawn_with_the_rest() -> None:
    found = profile_pictures._stacked({"parameters": [100, 100], "data": [1, 0], "other": [5, 5]}, 4)
    assert found == [("parameters", [100, 100]), ("other", [6, 5])]


def test_owners_have_one_list_of_names() -> None:
    assert list(profile_pictures.OWNERS) == list(profile_pictures.OWNER_COLOURS) == list(OWNERS)
