"""Problem -> configuration, each row with the measurement behind it."""
