"""Runs and measurements for people: lines above, beside and below a run, tables, pictures and pages. Loads no torch.

The way of a number::

    measured.json of each run -> Results -> columns -> the terminal's table, results.csv, report.html
    metrics.jsonl of each run -> RunView -> the block below a run, report.html
"""
