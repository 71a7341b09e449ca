"""Metrics sent on to the tools that a team uses, beside Determined's own.

The way of a number: the chief reports it to its core context (``sink``) -> it gets its name (``flattening``) and is
written to a process of its own (``sender``, ``tools_process``) -> there each tool has a thread (``tool_thread``) -> the
tool's client (``tools``). A training waits for none of it, and no client is loaded into a rank.
"""
