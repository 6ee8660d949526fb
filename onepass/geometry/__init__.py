"""Integer formulas of tiles, splits and pages, written once: for Python ints and, while a kernel is traced, for its own."""
