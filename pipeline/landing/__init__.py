"""Floor 2: what a user drops or sends becomes complete, immutable, uniquely named landing files for Spark to read."""
