"""The Ampere backward."""
