"""``det-ds``, one file a command."""
