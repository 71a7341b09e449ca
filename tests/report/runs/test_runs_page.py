"""The page of runs: all that is known of them in one file, that loads nothing and runs nothing from outside."""

from __future__ import annotations

import base64
import hashlib
import json
import math
from pathlib import Path
from typing import Any

import pytest

from determined_ds.protocol.kept_warnings import KeptWarning, append_warning
from determined_ds.protocol.launches import Launch
from determined_ds.protocol.metrics_file import append_record
from determined_ds.protocol.run_dir import RunDir
from determined_ds.report.runs.drawn_data import MOST_OF_A_CURVE, MOST_PARTS
from determined_ds.report.runs.run_view import RunView
from determined_ds.report.runs.runs_page import runs_page
from tests.report.recorded import BEGAN, course, launch, recorded, shown, training
from tests.report.test_page import EVIL, Page, loads

COMPLETED = {"status": "completed", "steps_completed": 40, "slots": 2}


def page_of(*runs: RunView) -> Page:
    return Page(runs_page(runs))


def data_of(page: Page) -> Any:
    return json.loads(page.texts["script"][0])


def facts_of(page: Page) -> dict[str, str]:
    return dict(zip(page.texts["dt"], page.texts["dd"], strict=True))


def test_one_run_says_what_came_out_and_how_it_was_trained(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", course(40), result=COMPLETED, checkpoints=[20, 40])
    page = page_of(shown(path))
    assert page.texts["title"] == ["gpt2"]
    assert page.texts["p"][0] == "Completed: 40 batches in 40 s; best validation_loss 1.1235 after batch 40."
    facts = facts_of(page)
    assert facts["command"] == "det-ds run gpt2.yaml ."
    assert facts["trained on"] == "2 slots (CPU), ZeRO 1, global batch 32 = 16 x 1 x 2 replicas"
    assert facts["newest checkpoint"] == "uuid-40, batch 40"
    assert page.rows[:2] == [
        [
            "run",
            "status",
            "batches planned",
            "time",
            "loss at first",
            "best validation_loss after",
            "samples/s",
        ],
        ["run", "completed", "40 of 40", "40 s", "1.0000 from 4.9000", "1.1235 batch 40", "120.5"],
    ]
    assert ["zero_optimization.stage", "1", "zero1.json:6"] in page.rows
    assert ["torch", "2.13.0"] in page.rows


def test_how_it_ended_is_there_to_be_pasted(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", course(40), result=COMPLETED)
    (block,) = page_of(shown(path)).texts["pre"]
    assert block.startswith("gpt2: completed, 40 batches\n  loss        4.9 -> 1\n")
    assert f"det-ds report {path} --open" in block


def test_its_curves_are_drawn_from_exact_validations_with_marks(tmp_path: Path) -> None:
    records = [*course(20), training(21, time=BEGAN + 505, loss=2.0)]
    launches = [launch(), launch(time=BEGAN + 500, kind="resume", steps_completed=20, reason="by hand")]
    page = page_of(shown(recorded(tmp_path / "run", records, launches=launches, checkpoints=[10, 20])))
    data = data_of(page)
    (run,) = data["runs"]
    assert data["charts"][0] == {"title": "loss", "curves": ["training/loss", "validation/validation_loss"]}
    assert run["curves"]["validation/validation_loss"] == {
        "s": [10, 10],
        "v": [4.123456789, 3.123456789],
        "t": [1000, 1000],
    }
    assert run["curves"]["training/loss"]["t"][-2:] == [100, 500]
    assert run["marks"] == [{"text": "resume", "step": 20, "seconds": 20.0}]
    assert run["checkpoints"] == [{"step": 10, "seconds": 10.0}, {"step": 20, "seconds": 20.0}]
    assert run["samples"] == 32
    assert any(row[1:3] == ["resume", "20"] for row in page.rows)


def test_a_still_picture_and_the_tables_need_no_script(tmp_path: Path) -> None:
    page = page_of(shown(recorded(tmp_path / "run", course(40))))
    assert len([tag for tag, _ in page.tags if tag == "svg"]) == 3
    assert (
        len([tag for tag, attrs in page.tags if tag == "path" and "stroke" in attrs]) == 5
    )  # one of them the dots


def test_several_runs_say_first_what_differs(tmp_path: Path) -> None:
    runs = []
    for name, rate, slope in (("slow", 0.001, 0.01), ("quick", 0.123456789012, 0.1)):
        given = launch(hyperparameters={"learning_rate": rate, "depth": 3}, versions={"torch": rate})
        runs.append(shown(recorded(tmp_path / name, course(40, slope=slope), launches=[given]), name))
    page = page_of(*runs)
    assert page.texts["p"][0] == "Best validation_loss 1.1235: quick, after batch 40."
    figures, consequences = page.rows[:3], page.rows[3:5]
    assert consequences == [["key", "slow", "quick"], ["torch", "0.001", "0.123457"]]
    assert [row[:3] for row in figures] == [
        ["run", "learning_rate", "status"],
        ["slow", "0.001", "not finished"],
        ["quick", "0.123457", "not finished"],
    ]
    assert ["depth", "3"] in page.rows
    assert [run["colour"] for run in data_of(page)["runs"]] == [0, 1]


def test_many_keys_that_differ_are_rows(tmp_path: Path) -> None:
    runs = []
    for name in ("one", "two"):
        given = launch(hyperparameters={f"key_{index}": f"{name} {index}" for index in range(20)})
        runs.append(shown(recorded(tmp_path / name, course(10), launches=[given]), name))
    page = page_of(*runs)
    assert page.rows[:2] == [["key", "one", "two"], ["key_0", "one 0", "two 0"]]
    assert page.texts["summary"][0] == "Hyperparameters and what was decided: 20 keys"


def test_runs_that_are_alike_say_so_by_no_table(tmp_path: Path) -> None:
    page = page_of(*(shown(recorded(tmp_path / name, course(10)), name) for name in ("one", "two")))
    assert page.texts["h2"][0] == "final figures"


@pytest.mark.parametrize(
    ("records", "result", "launches", "said"),
    [
        ([], None, None, "Not finished: 0 of 40 batches."),
        ([], {"status": "failed", "reason": "rank 1 was killed"}, None, "Failed: 0 of 40 batches."),
        (course(5), None, (), "Not finished: 5 batches in 4 s."),
        ([training(1, loss=math.nan)], None, None, "Not finished: 1 of 40 batches in 1 s."),
        (
            [{"group": "training", "steps_completed": 3, "metrics": {"loss": 1.0}}],
            None,
            (),
            "Not finished: 3 batches.",
        ),
    ],
    ids=["nothing yet", "killed in its first batch", "an earlier version's", "never finite", "no times"],
)
def test_there_is_always_a_page(
    tmp_path: Path, records: Any, result: Any, launches: tuple[Launch, ...] | None, said: str
) -> None:
    page = page_of(shown(recorded(tmp_path / "run", records, result=result, launches=launches)))
    assert page.texts["p"][0] == said
    told = " ".join(" ".join(cells) for cells in page.rows)
    assert "None" not in told
    assert "nan" not in told
    if result:
        assert any("rank 1 was killed" in item for item in page.texts["li"])
    else:
        assert any("result.json" in item for item in page.texts["li"])


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", course(5))
    with RunDir(path).metrics.open("a") as file:
        file.write('{"group": "training", "steps_comp')
    assert shown(path).steps == 5


def test_what_is_not_finite_is_drawn_as_such(tmp_path: Path) -> None:
    records = [training(1, loss=1.0), training(2, loss=math.inf), training(3, loss=math.nan)]
    page = page_of(shown(recorded(tmp_path / "run", records)))
    assert data_of(page)["runs"][0]["curves"]["training/loss"]["v"] == [1.0, "Infinity", "NaN"]
    assert page.rows[1][4].startswith("not finite")


def test_warnings_of_the_configuration_and_of_ranks_are_listed(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run", launches=[launch(warnings=("a batch of 1",))])
    warning = KeptWarning(message="slow loader", source="torch", count=1200, last_time=1.0, steps_completed=7)
    append_warning(RunDir(path).logs, warning, 1)
    page = page_of(shown(path))
    assert ["a batch of 1 configuration", "1", "", ""] in page.rows
    assert ["slow loader torch", "1,200", "batch 7", "1"] in page.rows


# ------------------------------------------------------------------------------------ nothing from outside


def evil(path: Path, text: str) -> RunView:
    """A run in which all that comes from outside is this text."""
    given = launch(
        **dict.fromkeys(("name", "runs", "command", "strategy", "reason", "kind"), text),
        hyperparameters={text: text},
        ds_config={text: text},
        origins={text: text},
        versions={text: text},
        machine={"host": text, text: text},
        warnings=(text,),
    )
    records = [training(1, **{text: 1.0, "loss": 1.0}), {**training(1, loss=2.0), "group": text}]
    result = {"status": text, "reason": text, "resume": text, "best": {"checkpoint": text}}
    config = {"name": text, "searcher": {"metric": text}, text: text}
    recorded(path, records, launches=[given, given], result=result, config=config)
    append_warning(RunDir(path).logs, KeptWarning(message=text, source=text, last_time=1.0), 0)
    return shown(path, text)


def tags(page: Page) -> list[str]:
    return [tag for tag, _ in page.tags]


def test_what_came_from_outside_is_text(tmp_path: Path) -> None:
    for count in (1, 2):
        hostile = page_of(
            *(evil(tmp_path / f"evil-{count}-{index}", f"{EVIL} {index}") for index in range(count))
        )
        plain = page_of(
            *(evil(tmp_path / f"plain-{count}-{index}", f"plain {index}") for index in range(count))
        )
        assert tags(hostile) == tags(plain)
        assert loads(hostile) == []
        assert data_of(hostile)["runs"][0]["label"] == f"{EVIL} 0"
        assert not [name for _, attrs in hostile.tags for name in attrs if name.startswith("on")]


def test_its_policy_lets_its_own_script_run_and_nothing_load(tmp_path: Path) -> None:
    run = shown(recorded(tmp_path / "run", course(10)))
    for live, connects in ((None, False), (3.0, True)):
        page = Page(runs_page([run], live_s=live))
        (policy,) = (attrs["content"] or "" for _, attrs in page.tags if "http-equiv" in attrs)
        digest = base64.b64encode(hashlib.sha256(page.texts["script"][1].encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}'" in policy
        assert policy.startswith("default-src 'none'")
        assert ("connect-src 'self'" in policy) == connects
        assert loads(page) == []


def test_the_licence_of_the_drawing_library_is_in_it(tmp_path: Path) -> None:
    text = runs_page([shown(recorded(tmp_path / "run", course(10)))])
    assert "Permission is hereby granted, free of charge" in text


# ------------------------------------------------------------------------------------------- long curves


def test_long_curves_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    path = recorded(tmp_path / "run")
    with RunDir(path).metrics.open("a") as file:
        for step in range(1, 10_001):
            loss = 99.0 if step == 7_777 else 1.0
            file.write(json.dumps(training(step, loss=loss)) + "\n")
    append_record(RunDir(path).metrics, training(10_001, loss=0.5))
    page = page_of(shown(path))
    curve = data_of(page)["runs"][0]["curves"]["training/loss"]
    assert len(curve["v"]) <= MOST_OF_A_CURVE
    assert 99.0 in curve["v"]
    assert len(curve["m"]["v"]) == MOST_PARTS
    assert curve["m"]["v"][0] == 1.0
    assert curve["v"][-1] == 0.5
    assert sum(curve["s"]) == 10_001
    assert any("of its 10,001 points" in item for item in page.texts["li"])
