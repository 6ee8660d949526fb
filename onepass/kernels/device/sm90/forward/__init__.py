"""The Hopper forward."""
