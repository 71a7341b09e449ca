"""Metrics sent on to the tools that a team uses, beside Determined's own."""
