"""A Determined master, from inside a rank: its core context, its searcher's stops, the task's log."""
