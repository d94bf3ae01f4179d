"""The ground floor: rules and values, standard library only. Only ``clock``, ``files``, ``background`` and ``stop`` do I/O."""
