"""Metrics sent to the tools that a team uses, beside Determined's own.

What the chief reports to its core context also goes to a thread (``reporting``), which hands it to the clients of the
tools (``clients``). Training does not wait for it.
"""
