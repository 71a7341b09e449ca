"""What ``make docs`` does beside mkdocs: short names in docstrings, tables of hyperparameters, and the commands' help.

Docstrings refer to names as Sphinx does, ``:class:`Name```; the site shows the bare name. The tables are made from the
models that the library reads an experiment with: a field's type, its default and its meaning.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import click

from determined_ds.cli.main import main
from determined_ds.config.params import LARGEST, Hyperparameters

HERE = "<!-- the tables of hyperparameters; `make docs` writes them -->"
COMMANDS_HERE = "<!-- the help of every command; `make docs` writes it -->"
HEAD = ("| name | value | default | meaning |", "|---|---|---|---|")
OF_TYPE = {
    int: "integer",
    bool: "true or false",
    str: "string",
    dict: "mapping",
    float: "number",
    Any: "any value",
}


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Put the tables of hyperparameters, one for each section of the YAML, and the commands where a page wants them."""
    if COMMANDS_HERE in markdown:
        return markdown.replace(
            COMMANDS_HERE, "\n\n".join(helps_of(main, click.Context(main, info_name="det-ds")))
        )
    if HERE not in markdown:
        return markdown
    sections: dict[str, list[str]] = {}
    for name, *cells in rows_of(Hyperparameters):
        line = " | ".join([f"| `{name}`", *cells]) + " |"
        line = line.replace("{", "`{").replace("}", "}`")  # as code
        sections.setdefault(name.rpartition(".")[0], []).append(line)
    tables = [
        "\n".join([f"### `{name}`" if name else "### At the top", "", *HEAD, *lines])
        for name, lines in sections.items()
    ]
    return markdown.replace(HERE, "\n\n".join(tables))


def helps_of(group: click.Group, context: click.Context) -> Iterator[str]:
    """A heading and the help of each command of a group, and of the groups below it."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        below = click.Context(
            command, info_name=name, parent=context, max_content_width=100, terminal_width=100
        )
        yield f"## {below.command_path}\n\n```text\n{command.get_help(below)}\n```"
        if isinstance(command, click.Group):
            yield from helps_of(command, below)


def rows_of(model: type, prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Name, value, default and meaning of each field of a model, and of the models below it."""
    hints = get_type_hints(model, include_extras=True)
    for field in fields(model):
        about, name = field.metadata, f"{prefix}{field.name}"
        hint = hints[field.name]
        value = about.get("form") or in_words(Literal[about["choices"]] if "choices" in about else hint)
        value += ' or "auto"' if "auto" in about else ""
        default = "none" if field.default in (MISSING, None) else str(field.default)
        yield (
            name,
            value,
            default.lower() if field.default in (True, False) else default,
            about["description"],
        )
        for each in (hint, *get_args(hint)):
            if is_dataclass(each) and all("description" in field.metadata for field in fields(each)):
                yield from rows_of(each, f"{name}.")


def in_words(hint: Any) -> str:
    """A type, e.g. ``integer >= 1``."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        low, high = args[1]
        return f"integer >= {low}" if high == LARGEST else f"integer from {low} to {high}"
    if origin in (Union, types.UnionType):
        return " or ".join(in_words(each) for each in args if each is not type(None))
    if origin is Literal:
        return f"one of {', '.join(args)}"
    return f"list of {in_words(args[0])}s" if origin is list else OF_TYPE.get(origin or hint, "mapping")


def on_page_content(html: str, **_: Any) -> str:
    """Replace ``:role:<code>~package.Name</code>`` by ``<code>Name</code>``."""
    html = re.sub(r":(?:class|func|meth|mod|data|attr):<code>~[\w.]*?(\w+)</code>", r"<code>\1</code>", html)
    return re.sub(r":(?:class|func|meth|mod|data|attr):<code>", "<code>", html)
