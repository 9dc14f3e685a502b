"""The mini corpus; rebuild it with ``ernie-multi corpus build mini``."""
