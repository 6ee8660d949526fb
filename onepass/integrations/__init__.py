"""Adapters that plug onepass into other libraries, each imported on demand: `integrations.transformers`."""
