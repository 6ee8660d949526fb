"""Timelines of the Hopper kernels: who does what inside a thread block, from time stamps of the running kernel."""
