"""The loop that delivers: no Spark here."""
