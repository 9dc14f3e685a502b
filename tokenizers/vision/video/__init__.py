"""Clips: the picture network inflated over time.

``files`` reads and writes clips, ``model`` is the network, ``weights`` its file, ``coder`` what the tokenizer
calls for a clip. ``data``, ``train`` and ``evaluation`` are the recipe for the weights.
"""
