"""What to change in a script or a trial that was written for another trainer, read from its source."""
