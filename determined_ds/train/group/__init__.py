"""The ranks of a run together: where they meet, their process group, their watch over one another."""
