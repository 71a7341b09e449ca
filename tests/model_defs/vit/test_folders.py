"""Both layouts of a folder of images are found; what is missing from them is named before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from model_defs.vit.folders import Finder, ImageFile, ImageSplits
from tests.package import refusals

CLASSES = ["apple_pie", "baby_back_ribs", "waffles"]


def picture(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (12, 10), (shade, 90, 200)).save(path)


@pytest.fixture
def food101(tmp_path: Path) -> Path:
    """Four images a class, the last of which is for validation."""
    for name in CLASSES:
        for identity in range(4):
            picture(tmp_path / "images" / name / f"{identity}.jpg")
    meta = tmp_path / "meta"
    meta.mkdir()
    (meta / "classes.txt").write_text("\n".join(CLASSES))
    (meta / "train.txt").write_text("".join(f"{name}/{i}\n" for name in CLASSES for i in range(3)))
    (meta / "test.txt").write_text("".join(f"{name}/3\n" for name in CLASSES))
    return tmp_path


def found(root: Path, **options: float) -> ImageSplits:
    return Finder(path=str(root), **options).find()  # type: ignore[arg-type]


def names(images: list[ImageFile], root: Path) -> list[tuple[str, int]]:
    return [(Path(image.path).relative_to(root).as_posix(), image.label) for image in images]


def problems_of(root: Path) -> list[str]:
    problems = refusals(lambda: found(root))
    assert {(problem.key, problem.value) for problem in problems} == {("data.path", str(root))}
    return [problem.message for problem in problems]


# --- Food-101 ---


def test_food_101_as_published(food101: Path) -> None:
    splits = found(food101)
    assert splits.classes == CLASSES
    assert len(splits.train) == 9
    assert names(splits.validation, food101) == [
        (f"images/{name}/3.jpg", label) for label, name in enumerate(CLASSES)
    ]


def test_what_is_wrong_with_the_lists_is_named_by_line(food101: Path) -> None:
    with (food101 / "meta/train.txt").open("a") as file:
        file.write("waffles/77\npancakes/1\nwaffles\nwaffles/3\n")
    unlisted, unknown, no_path, twice = problems_of(food101)
    assert all(word in unlisted for word in ("meta/train.txt:10", "images/waffles/77.jpg"))
    assert all(word in unknown for word in ("meta/train.txt:11", "'pancakes'"))
    assert "meta/train.txt:12" in no_path
    assert all(word in twice for word in ("waffles/3", "meta/train.txt", "meta/test.txt"))


# --- a folder a class ---


def test_train_and_val(tmp_path: Path) -> None:
    for name in (
        "train/b/2.PNG",
        "train/a/1.jpeg",
        "train/a/0.png",
        "val/b/9.png",
        "test/a/8.png",
        "train/a/.x.png",
    ):
        picture(tmp_path / name)
    (tmp_path / "train/a/notes.txt").touch()
    splits = found(tmp_path)
    assert splits.classes == ["a", "b"]
    assert names(splits.train, tmp_path) == [
        ("train/a/0.png", 0),
        ("train/a/1.jpeg", 0),
        ("train/b/2.PNG", 1),
    ]
    assert names(splits.validation, tmp_path) == [("val/b/9.png", 1)]


@pytest.mark.parametrize("below", ["", "train"])
def test_one_folder_is_split_by_names_wherever_it_lies(tmp_path: Path, below: str) -> None:
    root = tmp_path / "here"
    for number in range(60):
        path = root / below / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    here = found(root, validation_fraction=0.25)
    both = {*names(here.train, root), *names(here.validation, root)}
    assert len(here.train) + len(here.validation) == len(both) == 60
    assert 5 <= len(here.validation) <= 27
    moved = root.rename(tmp_path / "there")
    there = found(moved, validation_fraction=0.25)
    assert names(there.validation, moved) == names(here.validation, root)
    other = found(moved, validation_fraction=0.25, split_seed=1)
    assert names(other.validation, moved) != names(here.validation, root)


def test_classes_that_do_not_match(tmp_path: Path) -> None:
    for name in ("train/a/0.png", "train/b/0.png", "val/c/0.png"):
        picture(tmp_path / name)
    (tmp_path / "val/b").mkdir()
    empty, unknown = problems_of(tmp_path)
    assert empty.startswith("val/b")
    assert unknown.startswith("val/c")


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    assert len(problems_of(tmp_path / "nowhere")) == len(problems_of(tmp_path)) == 1
    picture(tmp_path / "only" / "0.png")
    assert "two classes" in problems_of(tmp_path)[0]
