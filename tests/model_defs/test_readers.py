"""Sections, rows of text and images: what is read, how it is split, and that what is wrong is named by file and row."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from model_defs.bert import data as bert
from model_defs.common.files import split
from model_defs.common.images import find_images
from model_defs.common.rows import read_rows
from model_defs.common.text import load_text
from model_defs.drivable_vit import data as drivable_vit
from model_defs.vit import data as vit
from tests.package import refusal

WORDS = ["<unk>", "<eos>", "one", "two", "three", "four"]


def save_tokenizer(folder: Path, **special_tokens: str) -> str:
    """Write a tokenizer that knows these words, numbered in their order; its folder."""
    known = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    known.pre_tokenizer = Whitespace()
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=known, unk_token="<unk>", **special_tokens)
    made.save_pretrained(folder)
    return str(folder)


def write_rows(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


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


def test_a_tokenizers_texts_are_joined_by_its_eos_token(tmp_path: Path) -> None:
    texts = ({"text": each} for each in ("one two", "three", "six four"))
    lines = write_rows(tmp_path / "lines.jsonl", *texts)
    (tmp_path / "held_out.txt").write_text("four three two one")
    config = {"path": lines, "validation_path": str(tmp_path / "held_out.txt")}
    data = load_text({**config, "tokenizer": save_tokenizer(tmp_path / "a", eos_token="<eos>")}, 3)
    assert data.vocab_size == len(WORDS)
    assert data.train.tokens_N.tolist() == [2, 3, 1, 4, 1, 0, 5]
    assert data.validation.tokens_N.tolist() == [5, 4, 3, 2]
    found = refusal(lambda: load_text({**config, "tokenizer": save_tokenizer(tmp_path / "b")}, 3))
    assert (found.key, "eos" in found.fix) == ("data.tokenizer", True)


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


def test_rows_of_tables_and_text_files(tmp_path: Path) -> None:
    """A folder at any depth by name, without what is hidden; texts that look like dates are texts."""
    for name, content in {
        "b/c.txt": "3",
        ".git/config": "hidden",
        "z.jsonl": '{"text": "one\\u2028"}\n{"text": "", "id": 3}\n',
        "y.csv": '\ufefflabel,text\r\nyes,"one, ""two""\nthree"\r\nNA,2020-01-01\r\n',
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content.encode())
    import pyarrow.parquet  # starts a thread: no module of tests may

    pyarrow.parquet.write_table(pyarrow.table({"text": ["one"], "label": [1]}), tmp_path / "x.parquet")
    found = {"b/c.txt": "3", "y.csv:1": 'one, "two"\nthree', "y.csv:2": "2020-01-01"}
    found |= {"x.parquet:1": "one", "z.jsonl:1": "one\u2028", "z.jsonl:2": ""}
    assert {row.name: row.text for row in read_rows(str(tmp_path))} == found
    assert [row.label for row in read_rows(str(tmp_path / "y.csv"), label="label")] == ["yes", "NA"]


def test_no_text_is_on_both_sides_of_a_validation(tmp_path: Path) -> None:
    data, again = load_text({}, 128), load_text(None, 128)  # bytes of the standard library
    assert (data.vocab_size, data.train.tokens_N.dtype, len(data.validation)) == (256, np.uint8, 512)
    assert np.array_equal(again.validation.tokens_N, data.validation.tokens_N)
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(f"{number:02}\n" * 10)
    found = load_text({"path": str(tmp_path), "validation_fraction": 0.25}, 4)
    train, validation = (set(side.tokens_N.tobytes().replace(b"\0", b"").split()) for side in found[:2])
    assert not train & validation
    assert (len(train | validation), 4 <= len(validation) <= 18) == (40, True)
    twice = {"path": str(tmp_path), "validation_path": str(tmp_path / "00.txt")}
    for load in (load_text, bert.load_texts):
        assert refusal(lambda load=load: load(twice, 4)).key == "data.validation_path"
    sides = bert.read_sides(bert.DataConfig())  # prose and code
    modules, texts = ([{getattr(row, of) for row in side} for side in sides] for of in ("name", "text"))
    assert not modules[0] & modules[1]
    assert not texts[0] & texts[1]


def test_images_of_train_and_val_or_split_by_names(tmp_path: Path) -> None:
    def touch(root: Path, *names: str) -> str:
        for name in names:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).touch()
        return str(root)

    both, one = tmp_path / "both", tmp_path / "one"
    touch(both, "train/a/0.png", "train/a/1.jpeg", "train/b/2.PNG", "val/b/9.png", "train/a/notes.txt")
    train, validation, classes, *_ = vit.load_images({"path": str(both)})
    found = [(Path(path).relative_to(both).as_posix(), label) for path, label in train]
    assert found == [("train/a/0.png", 0), ("train/a/1.jpeg", 0), ("train/b/2.PNG", 1)]
    assert ([label for _, label in validation], classes) == ([1], ["a", "b"])
    here = find_images(touch(one, *(f"{'ab'[number % 2]}/{number}.png" for number in range(60))), 0.25)
    there = find_images(str(one.rename(tmp_path / "moved")), 0.25)
    assert [[name for name, _ in side] for side in here] == [[name for name, _ in side] for side in there]
    assert (len(set(here[0] + here[1])), 5 <= len(here[1]) <= 27) == (60, True)
    touch(both, "val/c/1.png")
    refused = refusal(lambda: vit.load_images({"path": str(both)}))
    assert "of none of the classes a, b" in refused.message
    assert (refused.key, refused.value) == ("data.path", f"{both}/val/c/1.png")


def test_windows_of_frames(tmp_path: Path) -> None:
    """An image tells its scene, moment and view by its colour."""
    for index, (scene, num_moments) in enumerate({"train/a": 5, "val/c": 2}.items()):
        for moment, (view_index, view) in itertools.product(range(num_moments), enumerate(("front", "left"))):
            place = tmp_path / scene / f"{moment:03}"
            place.mkdir(parents=True, exist_ok=True)
            colour = (index * 10, moment * 10, view_index * 10)
            Image.new("RGB", (12, 8), colour).save(place / f"{view}.png")
            mask = Image.new("L", (12, 8), 0)
            mask.paste(255, (0, 4, 12, 8))
            mask.save(place / f"{view}_mask.png")
    data = drivable_vit.load_data({"path": str(tmp_path)}, img_size=4, seed=0)
    assert (data.num_views, data.num_moments) == (2, 2)
    assert (len(data.train), len(data.validation)) == (2, 1)  # of five moments, the last is left over
    pixels, masks = data.train[1]
    assert pixels.shape == (2, 2, 3, 4, 4)
    colours = ((pixels[..., 0, 0] + 1) * 127.5).round().int()
    assert colours.tolist() == [[[0, 20, 0], [0, 20, 10]], [[0, 30, 0], [0, 30, 10]]]
    assert masks[0, 0].tolist() == [[0] * 4, [0] * 4, [1] * 4, [1] * 4]
