"""Command lines of the tokenizers' recipes: what `ernie-multi tokenizer train NAME` and `evaluate NAME` call.

A module is a tokenizer, and its functions parse the arguments after the name. The recipes themselves are
with the tokenizers; training of text, and audio, have their command lines there too.
"""
