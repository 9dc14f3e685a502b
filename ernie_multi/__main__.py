"""``python -m ernie_multi`` is the ``ernie-multi`` command."""

from ernie_multi.cli import main

main()
