"""Where the time of a training step goes: some steps recorded by torch's profiler, and their traces read.

``capture.py`` and ``mfu.py`` run in the ranks that record, and load torch. The others load none and read what ranks
have left: ``record.py`` is what both agree on, ``steps.py`` takes steps apart, ``findings.py`` says what could be
faster.
"""
