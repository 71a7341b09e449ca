"""What a checkpoint holds, how it is written, and how it is read back."""
