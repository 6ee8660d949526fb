"""The choice of the backend that computes a problem, and the reason for it."""
