"""The semantic encoder: features that tell what is seen, beside those that tell how to redraw it.

``model`` is the network and its file. ``targets`` (what it shall learn, from names and a teacher), ``train``
and ``evaluation`` are the recipe for the weights.
"""
