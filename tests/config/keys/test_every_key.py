"""Every key that is known has a row in the tables that say what happens to it, and every row is a key's."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from determined_ds.config.deepspeed.normalized import known_keys
from determined_ds.config.deepspeed.old_names import NEW_NAMES
from determined_ds.config.fit_options import FitOptions
from determined_ds.config.hyperparameters import OWN_KEYS
from determined_ds.config.keys.fate import CLUSTER, IGNORED, PLACES, REFUSED, RUN, Fate, Meaning, row_of
from determined_ds.config.keys.of_json import DEEPSPEED
from determined_ds.config.keys.of_yaml import EXPERIMENT
from determined_ds.documents.document import KeyPath, dotted
from determined_ds.experiment.schema.of_master import schema


def experiment_keys() -> set[KeyPath]:
    """Every key of the experiment configuration, of every kind of searcher, storage and environment."""
    found: set[KeyPath] = set()

    def walk(node: Any, path: KeyPath) -> None:
        if not isinstance(node, dict):
            return
        for name, sub in node.get("properties", {}).items():
            found.add((*path, name))
            if name != "hyperparameters":
                walk(sub, (*path, name))
        further = [schema(node[ref]) for ref in ("$ref", "optionalRef") if ref in node]
        further += [node.get("items"), node.get("then"), *node.get("allOf", ())]
        for sub in (*further, *node.get("union", {}).get("items", ())):
            walk(sub, path)

    walk(schema("experiment"), ())
    # Known to the schema of any searcher, and to none that is left.
    found -= {("searcher", key) for key in ("budget", "train_stragglers", "unit")}
    own = {("hyperparameters", key) for key in OWN_KEYS}
    fit = {("hyperparameters", "fit", field.name) for field in dataclasses.fields(FitOptions)}
    return found | own | fit


def json_keys() -> set[KeyPath]:
    """Every key of the DeepSpeed JSON, but those that the installed DeepSpeed reads no more, which are refused."""
    found: set[KeyPath] = set()

    def walk(node: dict[str, Any], path: KeyPath) -> None:
        for key, child in node.get("keys", {}).items():
            here = (*path, key)
            if "removed" in child or "deprecated" in child or here in NEW_NAMES:
                continue
            found.add(here)
            walk(child, here)

    walk(known_keys(), ())
    for section in ("optimizer", "scheduler"):
        for names in known_keys()[f"{section}_params"].values():
            found |= {(section, "params", name) for name in names}
    return found


TABLES = {"experiment": (EXPERIMENT, experiment_keys), "deepspeed": (DEEPSPEED, json_keys)}


def test_the_enumeration_finds_what_is_deep_in_the_models() -> None:
    """Else that nothing is missing would mean nothing."""
    found = {dotted(path) for path in experiment_keys()}
    assert found >= {
        "searcher.bracket_rungs",
        "searcher.num_rungs",
        "searcher.max_length.batches",
        "checkpoint_storage.connection_string",
        "tensorboard_storage.bucket",
        "environment.image.cuda",
        "environment.pod_spec.spec.containers",
        "bind_mounts.host_path",
        "integrations.pachyderm.dataset.token",
        "log_policies.action.type",
        "hyperparameters.fit.stop_on_nan",
    }
    assert len(found) > 150
    assert len(json_keys()) > 330


@pytest.mark.parametrize("name", TABLES)
def test_every_key_has_a_row(name: str) -> None:
    table, keys = TABLES[name]
    assert [dotted(path) for path in sorted(keys()) if row_of(table, path) is None] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_row_is_of_a_key(name: str) -> None:
    table, keys = TABLES[name]
    of_torch = {"optimizer.params.amsgrad"}
    known = {dotted(path) for path in keys()} | of_torch
    assert [key for key in table if key not in known] == []


@pytest.mark.parametrize("name", TABLES)
def test_every_row_says_what_happens_in_every_place_and_why(name: str) -> None:
    table, _ = TABLES[name]
    places = len(PLACES) if name == "deepspeed" else len(PLACES) - 1
    for row in table.values():
        assert len(row.at) == places, row
        assert set(row.at) <= set("HRID"), row
        assert row.why, row
        if row.at[CLUSTER] in IGNORED + REFUSED:  # it is read nowhere: what to write instead?
            assert row.fix, row


def test_a_json_means_the_same_in_every_place() -> None:
    """It is judged once, wherever it will run."""
    rows = [row for row in DEEPSPEED.values() if {IGNORED, REFUSED} & set(row.at[:4])]
    assert all(len(set(row.at)) == 1 for row in rows)


def test_the_most_specific_row_wins() -> None:
    table = {
        key: Fate(key, "HHHH", Meaning.EFFECT, key)
        for key in ("environment", "environment.image", "environment.image.cpu")
    }
    assert [
        row_of(table, path)
        for path in (
            ("environment", "ports"),
            ("environment", "image", "cuda"),
            ("environment", "image", "cpu"),
        )
    ] == [table["environment"], table["environment.image"], table["environment.image.cpu"]]
    assert row_of(table, ("name",)) is None
    assert RUN == 0
