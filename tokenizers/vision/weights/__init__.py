"""The weights that ship: ``image.safetensors`` and its card ``image.json``."""
