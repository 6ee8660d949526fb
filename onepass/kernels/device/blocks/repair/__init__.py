"""Rows recomputed from global memory, one warp a row, after a NaN of a hidden key has reached their tile."""
