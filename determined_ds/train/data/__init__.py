"""Which samples a rank trains and validates on, in which order, and how a resumed run continues in the middle."""
