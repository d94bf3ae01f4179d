"""The ground floor: rules and values, standard library only, no IO (``clock.py`` apart)."""
