"""What a rank measures of its own work: the parts of a step, its floating-point operations, the device's peak."""
