"""The tiles of a thread block: which ones, in which order, and who waits for whom."""
