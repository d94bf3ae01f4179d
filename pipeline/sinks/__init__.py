"""Where messages go when they are due."""
