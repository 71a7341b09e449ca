"""What ``det-ds bench`` measures inside the ranks. Each module measures one kind, and returns figures of rank 0."""
