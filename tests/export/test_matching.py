"""Names of a checkpoint are those of a Hugging Face model, less one prefix; everything else is named."""

from __future__ import annotations

import pytest

from determined_ds.errors import ConfigError
from determined_ds.export.matching import Expected, Stored, match

SHAPES = {"body.in.weight": (4, 2), "body.out.weight": (2, 4), "head.bias": (3,)}
EXPECTED = Expected(shapes=SHAPES)


def prefixed(prefix: str) -> dict[str, tuple[int, ...]]:
    return {prefix + name: shape for name, shape in SHAPES.items()}


@pytest.mark.parametrize("prefix", ["", "model.", "wrapped.inner."])
def test_one_prefix_may_stand_before_all_names(prefix: str) -> None:
    found = match(EXPECTED, Stored(shapes=prefixed(prefix)), kind="Kind")
    assert found.names == {name: prefix + name for name in SHAPES}


def test_common_names_of_a_pipeline_count() -> None:
    shapes = {str(number): shape for number, shape in enumerate(SHAPES.values())}
    others = {name: str(number) for number, name in enumerate(SHAPES)}
    found = match(EXPECTED, Stored(shapes=shapes, others=others), kind="Kind")
    assert found.names == others


def test_a_tied_weight_is_taken_once_under_any_of_its_names() -> None:
    tied = Expected(shapes=SHAPES, tied={"body.in.weight": ("lm_head.weight",)})
    by_other = {"lm_head.weight": (4, 2), **{n: s for n, s in SHAPES.items() if n != "body.in.weight"}}
    assert match(tied, Stored(shapes=by_other), kind="K").names["body.in.weight"] == "lm_head.weight"
    alias = Stored(shapes=SHAPES, others={"lm_head.weight": "body.in.weight"})
    assert match(tied, alias, kind="K").copies == {}
    twice = Stored(shapes={**SHAPES, "lm_head.weight": (4, 2)})
    assert match(tied, twice, kind="K").copies == {"body.in.weight": ("lm_head.weight",)}


def test_what_does_not_fit_is_named() -> None:
    shapes = {"m.body.in.weight": (4, 3), "m.head.bias": (3,), "m.extra": (1,)}
    with pytest.raises(ConfigError) as caught:
        match(EXPECTED, Stored(shapes=shapes), kind="Kind")
    said = str(caught.value)
    assert "not those of Kind" in said
    assert "body.in.weight has shape (4, 3) in the checkpoint, and (4, 2) in it" in said
    assert "body.out.weight (2, 4) is not in the checkpoint" in said
    assert "m.extra (1,) is not in it" in said
    assert "fix: --to safetensors" in said
