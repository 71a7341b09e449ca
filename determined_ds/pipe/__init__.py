"""Pipeline schedules as data: which rank computes what in which order, what that costs, and what it holds. Pure."""
