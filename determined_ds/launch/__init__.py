"""Around the ranks: a run is prepared, launched, watched, restarted, stopped, resumed. Loads no torch."""
