"""What a machine can do: measured by its ranks, kept in ``machine.json``, shown as tables and pictures."""
