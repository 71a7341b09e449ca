"""The page's style sheet and its script: rows are sorted by a click on a head, and all else works without it."""

from __future__ import annotations

from determined_ds.report.style import FONTS, GRID, GROUND, INK, MUTED, PALETTE

_LIGHT = {"ink": INK, "muted": MUTED, "grid": GRID, "ground": GROUND, "page": "#f5f7f9", "accent": "#0b5cad"}
_DARK = {
    "ink": "#e8ebef",
    "muted": "#a3adb8",
    "grid": "#39424d",
    "ground": "#1a2027",
    "page": "#11161b",
    "accent": "#7ab8f5",
}


def _variables(colours: dict[str, str], dark: bool) -> str:
    strategies = {f"s{index}": pair[dark] for index, pair in enumerate(PALETTE)}
    return " ".join(f"--{name}: {colour};" for name, colour in {**colours, **strategies}.items())


STYLE = f"""
:root {{ color-scheme: light dark; {_variables(_LIGHT, False)} --font: {FONTS}; --warn: #9a4a00; --best: #e3f1e8; }}
@media screen and (prefers-color-scheme: dark) {{
  :root {{ {_variables(_DARK, True)} --warn: #f3a963; --best: #1e3a2b; }}
}}
* {{ box-sizing: border-box; }}
html {{ -webkit-text-size-adjust: 100%; }}
body {{ margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 var(--font); }}
main {{ max-width: 77rem; margin: 0 auto; padding: 2.5rem 1.25rem 4rem; }}
h1 {{ margin: 0 0 .5rem; font-size: 1.05rem; font-weight: 600; color: var(--muted); overflow-wrap: anywhere; }}
h2 {{ margin: 2.75rem 0 .75rem; font-size: 1.2rem; }}
.verdict {{ margin: 0; max-width: 56rem; font-size: 1.5rem; line-height: 1.35; font-weight: 600; text-wrap: pretty; }}
.card {{ background: var(--ground); border: 1px solid var(--grid); border-radius: 10px; }}
.run {{ display: grid; grid-template-columns: max-content 1fr; gap: .3rem 1.25rem; margin: 1.5rem 0 0;
  padding: 1rem 1.25rem; font-size: .92rem; }}
.run dt {{ color: var(--muted); }}
.run dd {{ margin: 0; overflow-wrap: anywhere; }}
code {{ font: .92em ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }}
.wide {{ overflow-x: auto; }}
table {{ width: 100%; border-collapse: separate; border-spacing: 0; font-size: .88rem;
  font-variant-numeric: tabular-nums; }}
th, td {{ padding: .5rem .55rem; text-align: right; vertical-align: top; white-space: nowrap; }}
thead th {{ vertical-align: bottom; font-weight: 600; border-bottom: 2px solid var(--grid); }}
tbody tr + tr > * {{ border-top: 1px solid var(--grid); }}
th:first-child, td.why {{ text-align: left; }}
th:first-child {{ padding-left: 1rem; }}
th:last-child, td:last-child {{ padding-right: 1rem; }}
tbody th {{ font-weight: 600; white-space: normal; min-width: 9.5rem; }}
td.why {{ white-space: normal; }}
td.why > div {{ max-width: min(48rem, 58vw); min-width: 12rem; }}
small {{ display: block; font-size: .82em; font-weight: 400; color: var(--muted); }}
.best {{ background: var(--best); }}
.status {{ font-weight: 600; color: var(--warn); }}
.dot {{ display: inline-block; width: .7em; height: .7em; margin-right: .45em; border-radius: 50%; }}
thead button {{ all: unset; cursor: pointer; }}
thead button:hover {{ color: var(--accent); }}
thead button:focus-visible {{ outline: 2px solid var(--accent); outline-offset: 3px; border-radius: 2px; }}
th[aria-sort] > button::after {{ content: " ↑"; color: var(--accent); }}
th[aria-sort="descending"] > button::after {{ content: " ↓"; }}
.note {{ margin: .6rem 0 0; font-size: .85rem; color: var(--muted); }}
.pictures {{ columns: 2 26rem; column-gap: 1.25rem; }}
figure {{ margin: 0 0 1.25rem; padding: 1rem 1.1rem; break-inside: avoid; }}
figcaption {{ margin-top: .6rem; padding-top: .6rem; border-top: 1px solid var(--grid); font-size: .88rem;
  color: var(--muted); }}
.picture {{ display: block; width: 100%; height: auto; }}
.picture * {{ stroke-linejoin: round; stroke-linecap: butt; }}
.reasons, .how {{ margin: 0; padding: 1rem 1.25rem 1rem 2.4rem; font-size: .95rem; }}
.reasons li, .how li {{ overflow-wrap: anywhere; }}
li + li {{ margin-top: .45rem; }}
footer {{ margin-top: 2rem; font-size: .85rem; color: var(--muted); }}
@media (max-width: 40rem) {{
  main {{ padding: 1.25rem .8rem 3rem; }}
  .verdict {{ font-size: 1.25rem; }}
  .run {{ grid-template-columns: 1fr; gap: 0; padding: .8rem 1rem; }}
  .run dd + dt {{ margin-top: .5rem; }}
  th, td {{ padding: .45rem .55rem; }}
  tbody th {{ white-space: normal; min-width: 7.5rem; }}
  tbody th, thead th:first-child {{ padding-left: .8rem; position: sticky; left: 0; background: var(--ground); }}
  td.why > div {{ max-width: 43vw; overflow-wrap: anywhere; }}
  figure {{ padding: .7rem .5rem; }}
  figcaption {{ padding-left: .4rem; padding-right: .4rem; }}
}}
@media print {{
  html {{ font-size: 9.5pt; }}
  body {{ background: none; font-size: 1rem; }}
  main {{ max-width: none; padding: 0; }}
  .card {{ border-color: #ccc; }}
  .wide {{ overflow: visible; }}
  table {{ font-size: 6.5pt; }}
  th, td {{ padding: .2rem .25rem; }}
  tbody th {{ min-width: 5rem; }}
  td.why > div {{ min-width: 0; }}
  .pictures {{ columns: 2; column-gap: .6rem; }}
  figure {{ padding: .5rem; margin-bottom: .6rem; }}
  tr, li {{ break-inside: avoid; }}
  h2 {{ break-after: avoid; }}
  .best, .dot, .picture {{ print-color-adjust: exact; -webkit-print-color-adjust: exact; }}
}}
""" + "\n".join(f".c{index} {{ background: var(--s{index}); }}" for index in range(len(PALETTE)))

SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  const sort = (head, column) => {
    const up = head.getAttribute("aria-sort") !== "ascending";
    const value = (row) => (row.cells[column] ? row.cells[column].dataset.value : undefined);
    const compare = (a, b) => {
      if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
      const order = isNaN(a) || isNaN(b) ? String(a).localeCompare(b, "en", { numeric: true }) : a - b;
      return up ? order : -order;
    };
    body.append(...[...body.rows].sort((one, other) => compare(value(one), value(other))));
    for (const each of heads) each.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
  };
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.title = "sort";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(head, column));
    head.append(button);
  });
}
"""
