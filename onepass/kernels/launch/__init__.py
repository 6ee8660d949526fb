"""From torch tensors to kernel arguments and a launch. Nothing here imports the kernel compiler when it is imported."""
