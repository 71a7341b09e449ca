"""Sections, rows of text and images: what is read, how it is split, and that what is wrong is named by file and row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from shutil import rmtree
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from model_defs.bert import data as bert
from model_defs.common import text
from model_defs.common.files import split
from model_defs.common.images import find_images
from model_defs.common.rows import read_rows, standard_library
from model_defs.common.sections import parse_section
from model_defs.common.text import TokenSequences, load_text
from model_defs.dcgan import data as dcgan
from model_defs.drivable_vit import data as drivable_vit
from model_defs.vit import data as vit
from tests.package import refusal, refusals

WORDS = ["<unk>", "<eos>", "one", "two", "three", "four"]


def save_tokenizer(folder: Path, **special_tokens: str) -> str:
    """Write a tokenizer that knows these words, numbered in their order; its folder."""
    known = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    known.pre_tokenizer = Whitespace()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=known, unk_token="<unk>", **special_tokens
    ).save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("kind", [each.DataConfig for each in (bert, text, dcgan, drivable_vit, vit)])
def test_every_wrong_key_of_a_section_is_reported_with_a_right_value(kind: Any) -> None:
    wrong = {"path": "", "validation_fraction": 1.0, "pth": "x"}
    found = refusals(lambda: parse_section(kind, wrong, section="data"))
    assert [(problem.key, problem.value) for problem in found] == [(f"data.{k}", v) for k, v in wrong.items()]
    fraction = f"data.validation_fraction: {kind().validation_fraction}"
    assert [found[0].fix, found[1].fix] == ["data.path: null", fraction]
    assert "did you mean path?" in found[2].fix
    assert refusal(lambda: parse_section(kind, ["path"], section="data")).key == "data"


@given(names=st.sets(st.text(), min_size=2, max_size=40), fraction=st.floats(0.001, 0.999))
def test_each_side_of_a_split_gets_a_sample_and_keeps_it_when_others_come(
    names: set[str], fraction: float
) -> None:
    samples = sorted(names)
    train, validation = split(samples, fraction, by=str)
    assert train
    assert validation
    assert sorted(train + validation) == samples
    others = [str(number) * 9 for number in range(500)]
    after, before = (split(each, 0.05, by=str)[1] for each in ([*samples, *others], others))
    assert [name for name in after if name in set(others)] == before


@pytest.mark.parametrize("load", [load_text, bert.load_texts])
def test_validation_data_within_the_training_data_is_refused(load: Any, tmp_path: Path) -> None:
    for path, other in ((".", "a.txt"), ("a.txt", "."), ("a.txt", "a.txt")):
        data = {"path": str(tmp_path / path), "validation_path": str(tmp_path / other)}
        assert refusal(lambda data=data: load(data, 4)).key == "data.validation_path"


# --- rows ---


def test_rows_of_tables_and_text_files(tmp_path: Path) -> None:
    """A folder at any depth by name, without what is hidden; texts that look like dates, or are long, are texts."""
    long = "x" * 3 * 2**20
    for name, content in {
        "b/c.txt": "3",
        "a.py": "1",
        ".git/config": "hidden",
        "b/.hidden.txt": "hidden",
        "z.jsonl": '{"text": "one\\u2028"}\n{"text": "", "id": 3}\n' + json.dumps({"text": long}),
        "y.csv": '\ufefflabel,text\r\nyes,"one, ""two""\nthree"\r\nNA,2020-01-01\r\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    import pyarrow.parquet  # starts a thread: no module of tests may

    table = pyarrow.table({"text": ["one", "two"], "label": [1, 0]})
    pyarrow.parquet.write_table(table, tmp_path / "x.parquet")
    found = {"a.py": "1", "b/c.txt": "3", "y.csv:1": 'one, "two"\nthree', "y.csv:2": "2020-01-01"}
    found |= {"x.parquet:1": "one", "x.parquet:2": "two"}
    found |= {"z.jsonl:1": "one\u2028", "z.jsonl:2": "", "z.jsonl:3": long}
    assert {row.name: row.text for row in read_rows(str(tmp_path))} == found
    for name, labels in {"y.csv": ["yes", "NA"], "x.parquet": [1, 0]}.items():
        assert [row.label for row in read_rows(str(tmp_path / name), label="label")] == labels
    library = [row.name for row in standard_library()]
    assert "json/decoder.py" in library
    assert not any("site-packages" in name or name.startswith("test/") for name in library)


@pytest.mark.parametrize(
    ("name", "content", "label", "said"),
    [
        ("nowhere/a.txt", None, None, "there is no text"),
        ("a.txt", b"na\xefve", None, "byte 0xef in position 2"),
        ("a.txt", b"naive", "label", "no table"),
        ("a.jsonl", b'{"text": "x"}\n{"text": 7}\n', None, "changed from string to number"),
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', None, "row 2: 'text' is None"),
        ("a.jsonl", b'{"text": "x", "label": 0.5}\n', "label", "row 1: 'label' is 0.5"),
        ("a.csv", b"sentence,label\nx,1\n", "label", "its columns: sentence, label"),
        ("a.csv", b"text,label\nx,1,2\ny,1\n", "label", "Expected 2 columns, got 3"),
        ("a.parquet", b"not a table", None, "cannot be read"),
    ],
)
def test_what_is_no_text_is_named(
    tmp_path: Path, name: str, content: bytes | None, label: str | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    found = refusal(lambda: read_rows(str(tmp_path / name), label=label))
    assert (found.key, found.value) == ("data.path", str(tmp_path / name))
    assert said in found.message


# --- text for language models ---


@given(num_tokens=st.integers(0, 200), sequence_length=st.integers(1, 30))
def test_windows_cover_the_text_but_for_a_last_one_that_is_not_full(
    num_tokens: int, sequence_length: int
) -> None:
    seen: list[int] = []
    for tokens_T, targets_T in TokenSequences(np.arange(num_tokens, dtype=np.uint8), sequence_length):
        assert tokens_T.dtype == targets_T.dtype == torch.int64
        assert len(tokens_T) == sequence_length
        assert torch.equal(tokens_T[1:], targets_T[:-1])
        seen += [*tokens_T.tolist(), targets_T[-1].item()]
    assert seen == list(range(len(seen)))
    assert 0 <= num_tokens - len(seen) <= sequence_length


def test_by_default_bytes_of_the_standard_library_and_no_file_on_both_sides(tmp_path: Path) -> None:
    data, again = load_text({}, 128), load_text(None, 128)
    assert (data.vocab_size, data.train.tokens_N.dtype, len(data.validation)) == (256, np.uint8, 512)
    assert len(data.train) > 10_000
    assert np.array_equal(again.validation.tokens_N, data.validation.tokens_N)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}\n" * 10)
    found = load_text({"path": str(tmp_path), "validation_fraction": 0.25}, 4)
    train, validation = (set(side.tokens_N.tobytes().replace(b"\0", b"").split()) for side in found[:2])
    assert not train & validation
    assert (len(train | validation), 4 <= len(validation) <= 18) == (40, True)
    # Of a single text the tail is held out, and of one too short it is said what there is.
    one = {"path": str(tmp_path / "00.txt"), "validation_fraction": 0.3}
    assert "21 tokens for training and 9 tokens" in refusal(lambda: load_text(one, 16)).message
    assert len(load_text(one, 8).validation) == 1


def test_a_tokenizers_texts_are_joined_by_its_eos_token(tmp_path: Path) -> None:
    lines = write_rows(
        tmp_path / "lines.jsonl", *({"text": each} for each in ("one two", "three", "six four"))
    )
    (tmp_path / "held_out.txt").write_text("four three two one")
    config = {"path": lines, "validation_path": str(tmp_path / "held_out.txt")}
    data = load_text({**config, "tokenizer": save_tokenizer(tmp_path / "a", eos_token="<eos>")}, 3)
    assert data.vocab_size == len(WORDS)
    assert data.train.tokens_N.tolist() == [2, 3, 1, 4, 1, 0, 5]
    assert data.validation.tokens_N.tolist() == [5, 4, 3, 2]
    found = refusal(lambda: load_text({**config, "tokenizer": save_tokenizer(tmp_path / "b")}, 3))
    assert (found.key, "eos" in found.fix) == ("data.tokenizer", True)


# --- texts and labels ---


def test_by_default_prose_and_code_with_no_module_and_no_text_on_both_sides() -> None:
    sides = bert.read_sides(bert.DataConfig())
    modules, texts = ([{getattr(row, of) for row in side} for side in sides] for of in ("name", "text"))
    assert all(modules)
    assert not modules[0] & modules[1]
    assert not texts[0] & texts[1]
    assert 0.04 < len(sides[1]) / sum(map(len, sides)) < 0.25


def test_texts_are_cut_or_padded_and_the_mask_says_where(tmp_path: Path) -> None:
    """By a tokenizer that loses nothing."""
    texts = [f"{'good' if number % 2 else 'bad'}, naïve {number}\t数字" for number in range(80)]
    rows = [{"text": each, "label": ("no", "yes")[number % 2]} for number, each in enumerate(texts)]
    config = {"path": write_rows(tmp_path / "a.jsonl", *rows), "vocab_size": 300}
    data = bert.load_texts({**config, "validation_fraction": 0.3}, 40)
    assert data.classes == ["no", "yes"]
    assert len(data.train) + len(data.validation) == 80
    for side in (data.train, data.validation):
        for tokens_T, mask_T, label in side:
            assert tokens_T.shape == mask_T.shape == (40,)
            assert torch.equal(~mask_T, tokens_T == data.tokenizer.pad_token_id)
            number = texts.index(data.tokenizer.decode(tokens_T, skip_special_tokens=True))
            assert label == number % 2
    assert bert.load_texts(config, 3).train[0][1].tolist() == [True] * 3


def labelled(path: Path, *labels: Any) -> str:
    return write_rows(path, *({"text": f"text {i}", "label": label} for i, label in enumerate(labels)))


def test_labels_by_name_or_number_and_those_that_do_not_do(tmp_path: Path) -> None:
    for labels, classes, numbers in (
        ((0, 2, 0), ["0", "1", "2"], [0, 2, 0]),
        (("b", "a", "b"), ["a", "b"], [1, 0, 1]),
    ):
        paths = [labelled(tmp_path / name, *labels) for name in ("a.jsonl", "b.jsonl")]
        config = {"path": paths[0], "validation_path": paths[1], "vocab_size": 300}
        data = bert.load_texts(config, 8)
        assert data.classes == classes
        assert [side.tensors[2].tolist() for side in (data.train, data.validation)] == [numbers] * 2
        other = {**config, "validation_path": labelled(tmp_path / "c.jsonl", labels[0], type(labels[0])(9))}
        found = refusal(lambda other=other: bert.load_texts(other, 8))
        assert (found.key, found.message[:9]) == ("data.validation_path", "c.jsonl:2")
    for labels in (("same", "same"), (5, 7)):
        path = labelled(tmp_path / "a.jsonl", *labels)
        assert "two or more classes" in refusal(lambda path=path: bert.load_texts({"path": path}, 8)).message
    without_pad = {
        "path": labelled(tmp_path / "a.jsonl", *"abab"),
        "tokenizer": save_tokenizer(tmp_path / "w"),
    }
    found = refusal(lambda: bert.load_texts(without_pad, 8))
    assert (found.key, "add_special_tokens" in found.fix) == ("data.tokenizer", True)


# --- images ---


def touch(root: Path, *names: str) -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()


def test_images_of_train_and_val_or_split_by_names(tmp_path: Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    touch(both, "train/a/0.png", "train/a/1.jpeg", "train/b/2.PNG", "val/b/9.png", "train/a/.x.png")
    touch(both, "other/a/8.png", "train/a/notes.txt")
    train, validation, classes, *_ = vit.load_images({"path": str(both)})
    assert [(Path(path).relative_to(both).as_posix(), label) for path, label in train] == [
        ("train/a/0.png", 0),
        ("train/a/1.jpeg", 0),
        ("train/b/2.PNG", 1),
    ]
    assert ([label for _, label in validation], classes) == ([1], ["a", "b"])
    touch(one, *(f"{'ab'[number % 2]}/{number}.png" for number in range(60)))
    here = find_images(str(one), 0.25)
    there = find_images(str(one.rename(tmp_path / "moved")), 0.25)
    assert [[name for name, _ in side] for side in here] == [[name for name, _ in side] for side in there]
    assert (len(set(here[0] + here[1])), 5 <= len(here[1]) <= 27) == (60, True)


@pytest.mark.parametrize(
    ("names", "value", "said"),
    [
        (("train/a/0.png", "train/b/0.png"), "", "2 images for training and 0 for validation"),
        (("a/0.png", "a/1.png"), "", "one class, a"),
        (("train/a/0.png", "train/b/0.png", "val/c/1.png"), "/val/c/1.png", "of none of the classes a, b"),
    ],
)
def test_folders_that_are_no_classes(tmp_path: Path, names: tuple[str, ...], value: str, said: str) -> None:
    touch(tmp_path, *names)
    found = refusal(lambda: vit.load_images({"path": str(tmp_path)}))
    assert (found.key, found.value) == ("data.path", f"{tmp_path}{value}")
    assert said in found.message


def test_digits_are_varied_in_training_and_photographs_mirrored() -> None:
    data, plain = vit.load_images(None), vit.Normalization()
    assert (data.classes, len(data.train) + len(data.validation)) == (list("0123456789"), 1797)
    varied = vit.Images(data.train, 16, plain, data.augmentation)
    still = vit.Images(data.validation, 16, plain)
    for images in (varied, still):
        pixels_CHW, label = images[0]
        assert (pixels_CHW.shape, pixels_CHW.dtype) == ((3, 16, 16), torch.float32)
        assert -1 <= pixels_CHW.min() < pixels_CHW.max() <= 1
        assert label == images.images[0][1]
    assert torch.equal(still[0][0], still[0][0])
    assert not torch.equal(varied[0][0], varied[0][0])
    half = Image.new("L", (40, 20))
    half.paste(255, (20, 0, 40, 20))
    mirrored = vit.Images([(half, 0)], 16, plain, vit.PHOTOGRAPHS._replace(crop_scale=1.0))
    assert {mirrored[0][0][0, 0, 0].item() for _ in range(40)} == {1.0, -1.0}


def test_the_middle_of_images_at_any_depth(tmp_path: Path) -> None:
    for index in range(12):
        image = Image.new("RGB", (20, 10), (index, 0, 255))
        image.paste((9, 9, 9), (0, 0, 3, 10))  # falls away: the middle is cut out
        folder = tmp_path / ("a" if index % 2 else "b/c")
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{index}.png")
    data = dcgan.load_images({"path": str(tmp_path), "validation_fraction": 0.4}, image_size=8)
    assert len({*data.train.images, *data.validation.images}) == 12
    assert data.train[0].shape == (data.num_colours, 8, 8) == (3, 8, 8)
    assert (data.train[0][1].max(), data.train[0][2].min()) == (-1, 1)
    (tmp_path / "a/1.png").write_bytes((tmp_path / "a/1.png").read_bytes()[:40])
    found = refusal(lambda: [side[i] for side in (data.train, data.validation) for i in range(len(side))])
    assert found.value == str(tmp_path / "a/1.png")


# --- frames, views and masks ---


@pytest.fixture
def frames(tmp_path: Path) -> Path:
    """Scenes of some moments; an image tells its scene, moment and view by its colour."""
    for index, (scene, num_moments) in enumerate({"train/a": 5, "train/b": 2, "val/c": 2}.items()):
        for moment in range(num_moments):
            place = tmp_path / scene / f"{moment:03}"
            place.mkdir(parents=True)
            for view_index, view in enumerate(("front", "left")):
                colour = (index * 10, moment * 10, view_index * 10)
                Image.new("RGB", (12, 8), colour).save(place / f"{view}.png")
                mask = Image.new("L", (12, 8), 0)
                mask.paste(255, (0, 4, 12, 8))
                mask.save(place / f"{view}_mask.png")
    return tmp_path


def load_frames(folder: Path, **more: Any) -> Any:
    return drivable_vit.load_data({"path": str(folder), **more}, img_size=4, seed=0)


def test_windows_of_frames(frames: Path) -> None:
    data = load_frames(frames)
    assert (data.num_views, data.num_moments) == (2, 2)
    assert (len(data.train), len(data.validation)) == (3, 1)  # of five moments, the last is left over
    pixels, masks = data.train[1]
    assert pixels.shape == (2, 2, 3, 4, 4)
    colours = ((pixels[..., 0, 0] + 1) * 127.5).round().int()
    assert colours.tolist() == [[[0, 20, 0], [0, 20, 10]], [[0, 30, 0], [0, 30, 10]]]
    assert masks[0, 0].tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
    (frames / "val/c").rename(frames / "train/c")
    split_by_scene = load_frames(frames / "train", num_moments=1)
    assert sorted([len(split_by_scene.train), len(split_by_scene.validation)]) in ([2, 7], [4, 5])


SMALL_MASK = Image.new("L", (6, 4))
WRONG: dict[str, Callable[[Path], object]] = {
    "No such file": lambda root: (root / "train/a/001/left_mask.png").unlink(),
    "is of (6, 4) pixels": lambda root: SMALL_MASK.save(root / "train/b/000/front_mask.png"),
    "cannot be read": lambda root: (root / "val/c/000/left.png").write_bytes(b"no image"),
    "its views are ['front']": lambda root: (root / "train/b/001/left.png").unlink(),
    "not in a scene and a moment": lambda root: SMALL_MASK.save(root / "train/a/front.png"),
    "a split has no sample": lambda root: rmtree(root / "val/c/001"),
}


@pytest.mark.parametrize("said", WRONG)
def test_what_is_wrong_with_frames_is_named(said: str, frames: Path) -> None:
    WRONG[said](frames)
    found = refusal(lambda: load_frames(frames))
    assert said in found.message
    assert str(found.value).startswith(str(frames))
