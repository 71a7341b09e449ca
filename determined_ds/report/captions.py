"""What to see in each picture, in a sentence or two."""

from __future__ import annotations

from collections.abc import Callable

from determined_ds.report.formatting import byte_unit, label, name_of, number, percent, slots_text
from determined_ds.report.results import Results
from determined_ds.report.strengths import ALIKE

WAITED_FOR = {"communication": "communication", "pipeline": "a neighbouring stage", "data": "data"}
WORTH_SAYING = 0.05  # of a step


def caption(name: str, results: Results) -> str:
    """What to see in a picture of these results.

    Args:
        name: Of the picture, see :data:`determined_ds.report.pictures.PICTURES`.
        results: What it was drawn from.
    """
    return _CAPTIONS[name](results)


def _throughput(results: Results) -> str:
    rows = [row for row in results.measured if row.samples_per_second is not None]
    fastest = max(rows, key=lambda row: row.samples_per_second or 0)
    slowest = min(rows, key=lambda row: row.samples_per_second or 0)
    text = "Longer is faster."
    if fastest is not slowest and fastest.samples_per_second and slowest.samples_per_second:
        times = number(fastest.samples_per_second / slowest.samples_per_second, 3)
        text += f" {label(fastest, results)} does {times} times as much as {label(slowest, results)}."
    if max(row.num_repetitions for row in rows) > 1:
        return f"{text} Where whiskers overlap, these measurements do not show which is faster."
    return f"{text} Each was measured once, so how far such numbers scatter is not known."


def _memory(results: Results) -> str:
    rows = [row for row in results.measured if row.peak_memory_bytes is not None]
    text = "Shorter is better."
    sizes = [row.peak_memory_bytes or 0 for row in rows]
    if len(rows) > 1 and max(sizes) > ALIKE * min(sizes):
        unit, size = byte_unit([min(sizes)])
        least = rows[sizes.index(min(sizes))]
        text += f" {label(least, results)} takes least, {number(min(sizes) / size, 3)} {unit}."
    if results.accelerator == "cpu":
        text += (
            " On a CPU the peak is the whole process, torch itself included: it hides what the states show."
        )
    off = [
        abs(row.estimated_model_state_bytes / row.model_state_bytes - 1)
        for row in results.measured
        if row.model_state_bytes and row.estimated_model_state_bytes is not None
    ]
    return f"{text} Estimates of the states are off by {percent(max(off))} at most." if off else text


def _parts(results: Results) -> str:
    text = "A few steps after those that were timed, recorded by torch's profiler: its shares of the median step."
    waiting = [
        ((row.parts or {}).get(part, 0.0), part, row) for row in results.measured for part in WAITED_FOR
    ]
    most, part, row = max(waiting, key=lambda found: found[0])
    if most >= WORTH_SAYING:
        text += f" {label(row, results)} waits most: {percent(most)} of a step, for {WAITED_FOR[part]}."
    return text


def _loss(results: Results) -> str:
    target = results.target_loss
    reached = [(row.seconds_to(target), row) for row in results.measured] if target is not None else []
    known = [(seconds, row) for seconds, row in reached if seconds is not None]
    seconds, row = min(known, key=lambda pair: pair[0])
    return (
        f"Further left is sooner: {label(row, results)} is there after {number(seconds, 3)} s. The loss is the"
        " highest that any ended at, so that all come to it; starting up is not counted."
    )


def _scaling(results: Results) -> str:
    shares = [(results.scaling_efficiency(row), row) for row in results.measured]
    known = [(share, row) for share, row in shares if share is not None]
    most = max(row.slots for _, row in known)
    share, row = max(((share, row) for share, row in known if row.slots == most), key=lambda pair: pair[0])
    return (
        "100 % would be twice as fast on twice as many slots, the global batch unchanged."
        f" On {slots_text(most)} {name_of(row, results)} keeps most: {percent(share)}."
    )


def _bubble(results: Results) -> str:
    return (
        "Pale is what the schedule alone costs, (p-1)/(m+p-1) of 1F1B with p stages and m micro-batches. More of them"
        " make it smaller; what is measured beyond it comes of uneven stages and of sending between them."
    )


def _schedules(results: Results) -> str:
    text = (
        "The median step of each pipeline, a row a rank, with the micro-batch's number where there is room. Above, its"
        " passes as the schedule plans them, as long as they were; below, as they ran. Where the planned bubble is"
        " larger than the counted one, parts are uneven; where the measured one is larger than the planned one,"
        " ranks wait for messages, or passes vary."
    )
    cores = " On a CPU, ranks that share cores slow each other down." if results.accelerator == "cpu" else ""
    return text + cores


_CAPTIONS: dict[str, Callable[[Results], str]] = {
    "throughput": _throughput,
    "memory": _memory,
    "parts": _parts,
    "loss": _loss,
    "scaling": _scaling,
    "bubble": _bubble,
    "schedules": _schedules,
}
