"""The DeepSpeed JSON by itself: its keys, its files, what it needs installed, and how one is made from Python."""
