"""Rounding Q, K and V to e4m3 on the GPU, each element read once."""
