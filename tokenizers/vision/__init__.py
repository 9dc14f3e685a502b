"""Pictures: a convolutional autoencoder with a multi-scale bit quantiser, and what is built on it.

``tokenizer`` is what services use: ``preprocessing`` (with ``colour``) brings a picture to its canvas,
``model`` is the network, ``execution`` runs it on a device, ``weights_file`` reads and writes its weights,
those that ship being in ``weights/``. The packages:

* ``training``: the recipe for the picture weights;
* ``video``: clips, the same network inflated over time;
* ``vit``: the semantic encoder of the understanding path.
"""

from ernie5.tokenizers.vision.tokenizer import VisionTokenizer

__all__ = ["VisionTokenizer"]
