"""GPU kernels and the blocks they share. Nothing here imports a kernel compiler when it is imported."""
