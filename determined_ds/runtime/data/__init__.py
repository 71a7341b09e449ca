"""Which samples a rank trains and validates on, in which order, and how a run goes on in the middle of them."""
