"""Looking into checkpoints: what one holds, whether it is intact, which may go, where two differ. Loads no torch."""
