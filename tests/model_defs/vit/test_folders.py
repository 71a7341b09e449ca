"""Both layouts of a folder of images are found; what is missing from them is named before training."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from determined_ds.errors import DataError, Problem
from model_defs.vit.folders import MAX_PROBLEMS, Finder, ImageFile, ImageSplits

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


def problems_of(root: Path) -> tuple[Problem, ...]:
    with pytest.raises(DataError) as caught:
        found(root)
    assert all((problem.key, problem.value) == ("data.path", str(root)) for problem in caught.value.problems)
    assert all(problem.fix for problem in caught.value.problems)
    return caught.value.problems


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
    messages = [problem.message for problem in problems_of(food101)]
    assert messages == [
        "meta/train.txt:10 names images/waffles/77.jpg, which is not there.",
        "meta/train.txt:11 is of class 'pancakes', which is not in meta/classes.txt.",
        "meta/train.txt:12 is 'waffles', not <class>/<id>.",
        "waffles/3 is in both meta/train.txt and meta/test.txt: validation data would be trained on.",
    ]


def test_many_missing_images_are_a_few_problems(food101: Path) -> None:
    (food101 / "meta/train.txt").write_text("".join(f"waffles/{i}\n" for i in range(100, 200)))
    assert len(problems_of(food101)) == MAX_PROBLEMS


@pytest.mark.parametrize("name", ["classes.txt", "train.txt", "test.txt"])
def test_lists_that_cannot_be_read(food101: Path, name: str) -> None:
    (food101 / "meta" / name).write_bytes(b"cr\xe8me")
    assert f"meta/{name} is not UTF-8: byte 0xe8 at offset 2." in [p.message for p in problems_of(food101)]
    (food101 / "meta" / name).unlink()
    assert any(
        p.message == f"meta/{name} cannot be read: No such file or directory." for p in problems_of(food101)
    )


def test_an_empty_split(food101: Path) -> None:
    (food101 / "meta/test.txt").write_text("\n")
    (problem,) = problems_of(food101)
    assert problem.message == "there is no image for validation."


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
    messages = [problem.message for problem in problems_of(tmp_path)]
    assert messages == ["val/b holds no image.", "val/c is of a class that training does not have."]


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    assert "no such folder" in problems_of(tmp_path / "nowhere")[0].message
    assert "no image in it" in problems_of(tmp_path)[0].message
    picture(tmp_path / "only" / "0.png")
    assert "two classes" in problems_of(tmp_path)[0].message
