"""Plugging onepass into other libraries, each imported only when asked for: `integrations.transformers`."""
