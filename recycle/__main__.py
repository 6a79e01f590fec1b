"""`python -m recycle`: the `recycle` command without its script on the path."""

from recycle.cli import main

main()
