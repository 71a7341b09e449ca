"""Where can one drive? A vision transformer over several cameras and several moments, and a mask for each view."""
