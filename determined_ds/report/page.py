"""Results as one HTML file that needs nothing but itself: no network, and no script to be read."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from datetime import datetime
from html import escape

from determined_ds.report.captions import caption
from determined_ds.report.measurements import WINDOW, Results
from determined_ds.report.page_style import SCRIPT, STYLE
from determined_ds.report.page_table import measurements
from determined_ds.report.pictures import PICTURES
from determined_ds.report.style import svg_of
from determined_ds.report.words import label, loss_text, memory_note, printable, reason, unmeasured, verdict


def report_page(results: Results) -> str:
    """The report: verdict, what was run, the table, pictures, what failed and why, how it was measured.

    The file loads nothing, and what came from outside is text in it, never markup. The same results give the same
    text.

    Args:
        results: What was measured, or could not be.
    """
    title = printable(results.title)
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src data:"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<header>
<h1>{escape(title)}</h1>
<p class="verdict">{escape(verdict(results))}</p>
{_run(results)}
</header>
{measurements(results)}
{_pictures(results)}
{_reasons(results)}
{_how(results)}
<footer>All numbers are in results.json and results.csv beside this page.</footer>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


# ------------------------------------------------------------------------------------------- what was run


def _run(results: Results) -> str:
    facts = {
        "command": f"<code>{escape(printable(results.command))}</code>",
        "machine": escape(printable(results.machine)),
        "date": escape(_date(results.created)),
        "measured": escape(_amount(results)),
        "global batch": escape(_batches(results)),
    }
    items = "\n".join(f"<dt>{name}</dt><dd>{fact}</dd>" for name, fact in facts.items() if fact)
    return f'<dl class="run card">\n{items}\n</dl>'


def _date(created: str) -> str:
    try:
        at = datetime.fromisoformat(created)
    except ValueError:
        return printable(created)
    zone = f" {at.tzname()}" if at.tzinfo else ""
    return f"{at.day} {at:%B %Y, %H:%M}{zone}"


def _amount(results: Results) -> str:
    repetitions = [each for row in results.measured for each in row.repetitions]
    if not repetitions:
        return ""
    times = _range(len(row.repetitions) for row in results.measured)
    steps = _range(len(each.step_seconds) for each in repetitions)
    warmup = _range(each.warmup for each in repetitions)
    return f"{times} x {steps} steps each, after {warmup} of warm-up, in fresh processes"


def _range(values: Iterable[int]) -> str:
    known = sorted(set(values))
    return str(known[0]) if len(known) == 1 else f"{known[0]} to {known[-1]}"


def _batches(results: Results) -> str:
    sizes = {(row.samples_per_step, row.tokens_per_sample) for row in results.measured}
    texts = [
        f"{samples:,} samples" + (f" of {tokens:,} tokens" if tokens else "")
        for samples, tokens in sorted(sizes, key=str)
        if samples is not None
    ]
    return "; ".join(texts)


# ---------------------------------------------------------------------------------------- pictures and words


def _pictures(results: Results) -> str:
    figures = []
    for picture in PICTURES:
        figure = picture.draw(results)
        if figure is not None:
            svg = svg_of(figure, picture.name).replace("<svg ", f'<svg aria-label="{picture.title}" ', 1)
            said = escape(caption(picture.name, results))
            figures.append(
                f'<figure class="card" id="{picture.name}">\n{svg}\n<figcaption>{said}</figcaption>\n</figure>'
            )
    if not figures:
        return ""
    inside = "\n".join(figures)
    return f'<section>\n<h2>Pictures</h2>\n<div class="pictures">\n{inside}\n</div>\n</section>'


def _reasons(results: Results) -> str:
    missing = unmeasured(results)
    if not missing:
        return ""
    items = "\n".join(
        f"<li><strong>{escape(label(row, results))}</strong>: {escape(reason(row))}</li>" for row in missing
    )
    return f'<section>\n<h2>Not measured</h2>\n<ul class="reasons card">\n{items}\n</ul>\n</section>'


def _how(results: Results) -> str:
    if not results.measured:
        return ""
    memory, turns, spread = memory_note(results), "", ""
    if any(len(row.repetitions) > 1 for row in results.measured):
        turns = " Repetitions took turns, so that a machine that slows down or speeds up favours none."
        spread = " The spread goes from the lowest to the highest of the repetitions' own medians."
    points = [
        f"Each was started in fresh processes, on the same model, data, seed and global batch.{turns}",
        "The steps of the warm-up are left out. A step's time is the median over all timed steps, and p95 is what one"
        f" step in twenty exceeds.{spread}",
        f"{memory[0].upper()}{memory[1:]}. It is that of the rank, and of the repetition, that took most.",
        "Model states are parameters, gradients and optimizer states as they were found in the engine; the estimate"
        " is what the memory model expects before anything runs.",
    ]
    if results.target_loss is not None:
        points.append(
            f"The loss is the mean of the last {WINDOW} steps. The loss that times are told to,"
            f" {loss_text(results.target_loss)}, is the highest that any ended at: the steps until the mean of"
            f" {WINDOW} is there, each at its median time."
        )
    if any(row.bubble is not None for row in results.measured):
        points.append(
            "A pipeline's bubble is the share of time in which its stages wait, from the times of the schedule's own"
            " instructions."
        )
    items = "\n".join(f"<li>{escape(each)}</li>" for each in points)
    return f'<section>\n<h2>How it was measured</h2>\n<ul class="how card">\n{items}\n</ul>\n</section>'
