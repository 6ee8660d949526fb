"""The Ampere forward, and the forward for few query rows."""
