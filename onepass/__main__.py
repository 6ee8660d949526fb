"""`python -m onepass`: the command line."""

from .cli import main

main()
