"""Docstrings refer to names as Sphinx does, ``:class:`Name```; the site shows the bare name."""

from __future__ import annotations

import re
from typing import Any


def on_page_content(html: str, **_: Any) -> str:
    """Replace ``:role:<code>~package.Name</code>`` by ``<code>Name</code>``."""
    html = re.sub(r":(?:class|func|meth|mod|data|attr):<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", html)
    return re.sub(r":(?:class|func|meth|mod|data|attr):<code>", "<code>", html)
