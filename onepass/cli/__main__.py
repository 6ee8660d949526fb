"""`python -m onepass.cli`, for a checkout that is not installed."""

from . import main

main()
