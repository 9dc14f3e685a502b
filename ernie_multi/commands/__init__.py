"""The commands of `ernie-multi`, by theme, one thin function each; ``ernie_multi.cli`` puts them together.

What a command calls is imported when it runs, by ``deferred``; ``options`` holds the options that several
commands share.
"""
