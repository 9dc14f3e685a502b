"""Generation with a key-value cache."""
