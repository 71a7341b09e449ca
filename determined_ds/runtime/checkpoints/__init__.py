"""What a checkpoint holds, how it is written and read back."""
