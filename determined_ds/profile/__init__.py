"""Where the time of a training step goes: some steps recorded by torch's profiler, and their traces read.

``capture.py``, ``marks.py`` and ``mfu.py`` run in the ranks that record, and load torch. The others read what ranks
have left, and load none: ``record.py`` is what both agree on, ``trace.py`` reads a trace, ``steps.py`` takes its steps
apart, ``findings.py`` says what could be faster.
"""
