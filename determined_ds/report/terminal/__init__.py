"""A run on a terminal: a panel while it trains, a block to paste at its end. Loads no torch."""
