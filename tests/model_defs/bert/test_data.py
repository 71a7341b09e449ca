"""Rows become classes and tokens: the same everywhere, and nothing of validation in training."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from model_defs.bert.data import DataConfig, load_texts, read_rows, trained_tokenizer
from tests.model_defs.words import save_tokenizer
from tests.package import refusal

WORDS = ["<unk>", "<pad>", "good", "bad", "very", "not"]


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    file = tmp_path / "reviews.csv"
    lines = [
        f"{'good' if number % 2 else 'bad'} number {number},{'yes' if number % 2 else 'no'}"
        for number in range(80)
    ]
    file.write_text("\n".join(["text,label", *lines]))
    return file


# --- the default: prose against code ---


def test_no_module_and_no_text_is_on_both_sides() -> None:
    sides = read_rows(DataConfig())
    modules, texts = ([{getattr(row, of) for row in side} for side in sides] for of in ("name", "text"))
    assert all(modules)
    assert not modules[0] & modules[1]
    assert not texts[0] & texts[1]
    assert sum(map(len, texts)) == sum(map(len, sides))


# --- tokens ---


def test_a_trained_tokenizer_loses_nothing() -> None:
    tokenizer = trained_tokenizer(["a few words of training"], 300)
    text = "Other words, naïve – and 数字\n\tall the same"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    assert (ids[0], ids[-1]) == (tokenizer.cls_token_id, tokenizer.sep_token_id)
    assert tokenizer.unk_token_id not in ids


def test_texts_are_cut_or_padded_and_the_mask_says_where(reviews: Path) -> None:
    data = load_texts({"path": str(reviews), "vocab_size": 300, "validation_fraction": 0.3}, 12)
    assert data.classes == ["no", "yes"]
    assert len(data.train) + len(data.validation) == 80
    pad = data.tokenizer.pad_token_id
    for dataset in (data.train, data.validation):
        for index in range(len(dataset)):
            tokens_T, mask_T, label = dataset[index]
            assert tokens_T.shape == mask_T.shape == (12,)
            assert tokens_T.dtype == mask_T.dtype == torch.int64
            assert torch.equal(mask_T == 0, tokens_T == pad)
            text = data.tokenizer.decode(tokens_T, skip_special_tokens=True)
            assert text.startswith(("bad", "good")[label])
    assert load_texts({"path": str(reviews), "vocab_size": 300}, 3).train[0][1].tolist() == [1, 1, 1]


def test_tokenizers_that_do_not_do(reviews: Path, tmp_path: Path) -> None:
    folder = save_tokenizer(tmp_path / "words", WORDS)  # without a pad token
    found = refusal(lambda: load_texts({"path": str(reviews), "tokenizer": folder}, 8))
    assert (found.key, "add_special_tokens" in found.fix) == ("data.tokenizer", True)
    transformers.BertConfig().save_pretrained(tmp_path / "bare")
    bare = refusal(lambda: load_texts({"path": str(reviews)}, 8, pretrained=str(tmp_path / "bare")))
    assert bare.key == "hyperparameters.pretrained"


# --- labels ---


def labelled(path: Path, *labels: str) -> str:
    path.write_text("".join(f'{{"text": "text {i}", "label": {label}}}\n' for i, label in enumerate(labels)))
    return str(path)


@pytest.mark.parametrize(
    ("labels", "listed", "classes", "numbers"),
    [
        (("0", "2", "0"), None, ["0", "1", "2"], [0, 2, 0]),
        (('"b"', '"a"', '"b"'), None, ["a", "b"], [1, 0, 1]),
        (('"b"', '"a"', '"b"'), ["b", "a"], ["b", "a"], [0, 1, 0]),
        (("1", "0", "1"), ["no", "yes"], ["no", "yes"], [1, 0, 1]),
    ],
    ids=["numbers", "names", "names in an order of their own", "numbers with names"],
)
def test_labels_by_name_or_number(
    tmp_path: Path, labels: tuple[str, ...], listed: list[str] | None, classes: list[str], numbers: list[int]
) -> None:
    paths = [labelled(tmp_path / name, *labels) for name in ("a.jsonl", "b.jsonl")]
    data = load_texts({"path": paths[0], "validation_path": paths[1], "labels": listed, "vocab_size": 300}, 8)
    assert data.classes == classes
    assert data.train.labels_S == data.validation.labels_S == numbers


def test_labels_outside_are_named_by_file_and_row(tmp_path: Path) -> None:
    data = {"path": labelled(tmp_path / "a.jsonl", "0", "1", "1")}
    for name, labels, place in (
        ("b", ("1", "2"), "b.jsonl:2"),
        ("c", ('"maybe"',), "c.jsonl:1"),
        ("d", ("0.5",), "d.jsonl:1"),
    ):
        given = {**data, "validation_path": labelled(tmp_path / f"{name}.jsonl", *labels)}
        found = refusal(lambda given=given: load_texts({**given, "vocab_size": 300}, 8))
        assert found.message.startswith(place)


def test_one_text_cannot_be_split(tmp_path: Path) -> None:
    (tmp_path / "one.csv").write_text("text,label\nsame,yes\nsame,no\n")
    assert "none is for validation" in refusal(lambda: load_texts({"path": f"{tmp_path}/one.csv"}, 8)).message
