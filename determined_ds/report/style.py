"""The one look of all pictures and pages: colours, figures, figures as SVG, and HTML files that load nothing.

matplotlib and jinja2 are imported within functions: asking for a table must not wait for them. The state of
``pyplot`` is never touched.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from determined_ds.report.results import PARTS, Results

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Of each strategy in the order of the rows. The first seven are those of Okabe and Ito's palette
# that show on white, "Color Universal Design" (2008); the others are of Paul Tol's "muted", which keep apart from them.
PALETTE = (
    *("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#882255"),
    *("#999933", "#332288", "#117733"),
)
PART_COLOURS = dict(zip(PARTS, PALETTE, strict=False))
INK, MUTED, GRID, GROUND = "#1f2329", "#5c6570", "#dde2e8", "#ffffff"
PAGE, ACCENT = "#f5f7f9", "#0b5cad"
ON_LIGHT, ON_DARK = "#101418", "#fdfdfd"  # numbers in bars
ASSETS = Path(__file__).parent / "assets"
WIDTH_IN = 5.0
FONT_PT, SMALL_PT = 10, 9
OUTSIDE_IN = 0.75  # of a panel: title, numbers and name of the axis
PNG_DPI = 200
SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans"],  # matplotlib brings it along: pictures are the same everywhere
    "text.usetex": False,
    "text.parse_math": False,  # a name may hold dollar signs
    **dict.fromkeys(("font.size", "axes.titlesize"), FONT_PT),
    **dict.fromkeys(("axes.labelsize", "xtick.labelsize", "ytick.labelsize"), SMALL_PT),
    **dict.fromkeys(("text.color", "axes.titlecolor"), INK),
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color"), MUTED),
    **dict.fromkeys(("figure.facecolor", "savefig.facecolor"), GROUND),
    **dict.fromkeys(("axes.spines.top", "axes.spines.right"), False),
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.facecolor": "none",
    "axes.axisbelow": True,
    "lines.linewidth": 1.8,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "svg.fonttype": "path",  # a page looks the same everywhere
    "svg.hashsalt": "determined_ds",  # and the same figure gives the same text
}


def strategy_colours(results: Results) -> dict[str, str]:
    """Strategy -> its colour in all pictures and on the page: by the order of the rows, measured or not."""
    names = dict.fromkeys(row.name for row in results.rows)
    return {name: PALETTE[index % len(PALETTE)] for index, name in enumerate(names)}


def ink_on(colour: str) -> str:
    """What can be read on a colour: dark or light, whichever contrasts more, by WCAG 2's luminance."""
    red, green, blue = ((int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5))
    return ON_LIGHT if 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.18 else ON_DARK


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """Within it, matplotlib draws in this style; its settings are as before afterwards."""
    import matplotlib

    with matplotlib.rc_context(), warnings.catch_warnings():
        # A browser has signs that the font of the layout has not.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        matplotlib.rcdefaults()
        parameters: Any = matplotlib.rcParams  # typed by a list of all their names
        parameters.update(SETTINGS)
        yield


def figure_of(heights: list[float], width: float = WIDTH_IN) -> tuple[Figure, list[Axes]]:
    """A figure with panels one below the other, of these heights in inches, their titles and axes apart."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    layout = ConstrainedLayoutEngine(w_pad=0.06, h_pad=0.08, hspace=0.04)
    figure = Figure(figsize=(width, sum(heights) + OUTSIDE_IN * len(heights)), layout=layout)
    grid = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    panels = [figure.add_subplot(grid[index, 0]) for index in range(len(heights))]
    for panel in panels:
        panel.tick_params(length=0, pad=5)
    return figure, panels


def png_of(figure: Figure) -> bytes:
    """A figure as PNG, on white."""
    return _saved(figure, format="png", dpi=PNG_DPI, metadata={"Software": None})


def address_of(figure: Figure) -> str:
    """A figure as SVG without a ground, in an address of an ``<img>``: nothing in it can be markup of the page."""
    figure.patch.set_visible(False)
    text = _saved(figure, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return f"data:image/svg+xml;base64,{base64.b64encode(text).decode()}"


def _saved(figure: Figure, **how: Any) -> bytes:
    file = io.BytesIO()
    with drawing():
        figure.savefig(file, **how)
    return file.getvalue()


def self_contained(template: str, scripts: Sequence[str], **values: Any) -> str:
    """A page in one file that loads nothing; what is in the values is text, unless it is markup of our own.

    ``scripts`` run on the page, one after the other, under their digest; nothing else may.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    script = "\n".join((ASSETS / name).read_text(encoding="utf-8").rstrip("\n") for name in scripts) + "\n"
    colours = {"ink": INK, "muted": MUTED, "grid": GRID, "ground": GROUND, "page": PAGE, "accent": ACCENT}
    how: dict[str, Any] = {"trim_blocks": True, "lstrip_blocks": True, "undefined": StrictUndefined}
    environment = Environment(loader=FileSystemLoader(ASSETS), autoescape=True, **how)
    return environment.get_template(template).render(
        script=Markup(script),
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        colours=colours | {f"s{index}": colour for index, colour in enumerate(PALETTE)},
        num_colours=len(PALETTE),
        **values,
    )
