"""Looking into checkpoints: what one holds, whether it is intact, where two differ. Loads no torch."""
