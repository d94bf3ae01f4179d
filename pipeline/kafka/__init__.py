"""What the ingest job and the drain loops ask of a Kafka cluster, and the way out into its topics."""
