"""Adapters that plug onepass into other libraries, each imported on demand: `transformers`, `torch_sdpa`, `vllm`."""
