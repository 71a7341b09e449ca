"""How the master judges a config: by Determined's own schemas, and by what its code refuses beside them."""

from __future__ import annotations

from typing import Any

from determined.common import util

from tests.cluster.state import Json
from tests.harness import master_code, master_schemas


def check(config: Json, storage: dict[str, Json]) -> tuple[list[str], Json]:
    """Judge a config as submitted.

    Args:
        config: As parsed from YAML.
        storage: ``checkpoint_storage`` of the cluster.

    Returns:
        What the master refuses, none if it takes the config; and the config with the defaults filled in.
    """
    refused = master_schemas.errors(config, checkpoint_storage=storage) or master_code.create_errors(config)
    if refused:
        return refused, {}
    return [], as_go(master_schemas.fill_defaults(config, checkpoint_storage=storage))


def parse(text: str) -> Json:
    """YAML 1.2, as Go and Determined's client read it: 1e+30 is a number."""
    return util.safe_load_yaml_with_exceptions(text)


def as_go(value: Any) -> Any:
    """Numbers as Go writes them in JSON: 1.0 is 1."""
    if isinstance(value, dict):
        return {key: as_go(item) for key, item in value.items()}
    if isinstance(value, list):
        return [as_go(item) for item in value]
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e21:
        return int(value)
    return value


def merge(under: Json, over: Json) -> Json:
    """One config laid over another: mappings key by key, anything else as it is in ``over``."""
    if isinstance(under, dict) and isinstance(over, dict):
        both = {key: merge(under[key], over[key]) for key in under.keys() & over.keys()}
        return {**under, **over, **both}
    return over
