"""Sub-networks: sampling them in training, choosing them for use."""
