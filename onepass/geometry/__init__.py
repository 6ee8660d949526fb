"""Integer formulas of tiles, splits, pages and lengths: they run on Python ints and, inside a kernel, on device ints."""
