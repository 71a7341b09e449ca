"""Both layouts of a folder of images are found; what is missing from them is named before training."""

from __future__ import annotations

from pathlib import Path

import pytest

from model_defs.vit.folders import find_images
from tests.package import refusal

CLASSES = ["apple_pie", "baby_back_ribs", "waffles"]


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def names(images: list[tuple[str, int]], root: Path) -> list[tuple[str, int]]:
    return [(Path(path).relative_to(root).as_posix(), label) for path, label in images]


def refused(root: Path) -> str:
    found = refusal(lambda: find_images(str(root)))
    assert (found.key, found.value) == ("data.path", str(root))
    return found.message


@pytest.fixture
def food101(tmp_path: Path) -> Path:
    """Four images a class, the last of which is for validation."""
    lists = {
        "classes": CLASSES,
        "train": [f"{name}/{i}" for name in CLASSES for i in range(3)],
        "test": [f"{name}/3" for name in CLASSES],
    }
    (tmp_path / "meta").mkdir()
    for name, lines in lists.items():
        (tmp_path / "meta" / f"{name}.txt").write_text("\n".join(lines) + "\n")
    return tmp_path


def test_food_101_as_published(food101: Path) -> None:
    found = find_images(str(food101))
    assert (found.classes, len(found.train)) == (CLASSES, 9)
    listed = [(f"images/{name}/3.jpg", label) for label, name in enumerate(CLASSES)]
    assert names(found.validation, food101) == listed


@pytest.mark.parametrize(("line", "said"), [("pancakes/1", "no class"), ("waffles/3", "in both")])
def test_a_line_that_is_wrong_is_named(line: str, said: str, food101: Path) -> None:
    with (food101 / "meta/train.txt").open("a") as file:
        file.write(f"{line}\n")
    message = refused(food101)
    assert line in message
    assert said in message


def test_train_and_val(tmp_path: Path) -> None:
    of_train = [("train/a/0.png", 0), ("train/a/1.jpeg", 0), ("train/b/2.PNG", 1)]
    touch(tmp_path, *(name for name, _ in of_train), "val/b/9.png", "test/a/8.png", "train/a/.x.png")
    touch(tmp_path, "train/a/notes.txt")
    found = find_images(str(tmp_path))
    assert found.classes == ["a", "b"]
    assert names(found.train, tmp_path) == of_train
    assert names(found.validation, tmp_path) == [("val/b/9.png", 1)]
    touch(tmp_path, "val/c/0.png")
    assert "val/c" in refused(tmp_path)
    (tmp_path / "train/c").mkdir()
    assert "c holds no image" in refused(tmp_path)


@pytest.mark.parametrize("below", ["", "train"])
def test_one_folder_is_split_by_names_wherever_it_lies(tmp_path: Path, below: str) -> None:
    root = tmp_path / "here"
    touch(root / below, *(f"{'ab'[number % 2]}/{number}.png" for number in range(60)))
    here = find_images(str(root), validation_fraction=0.25)
    both = {*names(here.train, root), *names(here.validation, root)}
    assert len(here.train) + len(here.validation) == len(both) == 60
    assert 5 <= len(here.validation) <= 27
    moved = root.rename(tmp_path / "there")
    there = find_images(str(moved), validation_fraction=0.25)
    assert names(there.validation, moved) == names(here.validation, root)
    other = find_images(str(moved), validation_fraction=0.25, split_seed=1)
    assert names(other.validation, moved) != names(here.validation, root)


def test_nothing_to_learn_from(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    touch(tmp_path, "only/0.png")
    assert "1 images for training and 0 for validation" in refused(tmp_path)
