"""The templates by what they need: the paths of their YAML, from the repository's root."""

from __future__ import annotations

from tests.package import DS_CONFIGS, EXPERIMENTS, ROOT

TEMPLATES = [str(path.relative_to(ROOT)) for path in EXPERIMENTS]
JSONS = [str(path.relative_to(ROOT)) for path in DS_CONFIGS]


def comments(path: str) -> list[str]:
    """What a template shows, needs and gave."""
    return (ROOT / path).read_text().splitlines()[:3]


RUN_ANYWHERE = [path for path in TEMPLATES if "CPU" in comments(path)[1]]
# Every strategy with one model, and every model with one strategy.
RUN_HERE = [path for path in RUN_ANYWHERE if "/gpt2/" in path or path.endswith("/const.yaml")]
