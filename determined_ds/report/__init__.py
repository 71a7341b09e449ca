"""Measurements as a table for the terminal, CSV and a page. Pure: loads no torch.

The way of a number::

    measured.json of each run -> Results -> results.json, results.csv, report.html
                                         -> results_table (terminal)
"""
