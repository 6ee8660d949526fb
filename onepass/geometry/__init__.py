"""Integer formulas of tiles, splits and pages, written once: for Python ints and for the numbers of a traced kernel."""
