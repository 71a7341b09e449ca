"""Metrics sent to the tools that a team uses, beside Determined's own.

What the chief reports to its core context also goes to a thread of each tool (``reporting``), which hands it to the
tool's client (``clients``). Training waits for none of them.
"""
