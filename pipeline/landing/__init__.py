"""Floor 2: what a user drops or sends becomes whole, immutable, uniquely named landing files for Spark to read."""
