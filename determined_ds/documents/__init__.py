"""Text with places: YAML and JSON, read, overlaid, compared and written. Knows neither DeepSpeed nor Determined."""
