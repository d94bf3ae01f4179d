"""Reading the messages of a topic: ``consumer.Consumer`` is what user code needs."""
