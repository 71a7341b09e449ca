"""What a Determined cluster needs: its start-up hook, core context, log levels, and its trials as recorded runs."""
