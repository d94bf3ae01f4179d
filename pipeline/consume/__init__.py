"""Reading the messages of a topic: user code needs ``opening.open_consumer``, and ``handling.run`` or its methods."""
