"""`python -m recycle`: the `recycle` command, where its script is not on the path."""

from recycle.cli import main

main()
