"""The backend that computes a problem, and why it is that one."""
