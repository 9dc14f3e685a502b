"""Pictures: a convolutional autoencoder with a multi-scale bit quantiser.

``tokenizer`` is what services use; ``train`` holds the recipe for the weights in ``weights/``.
"""

from ernie5.tokenizers.vision.tokenizer import VisionTokenizer

__all__ = ["VisionTokenizer"]
