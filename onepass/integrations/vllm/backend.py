"""The classes of an attention backend of vLLM: what it supports, the metadata of a step, and a layer.

Written for the interfaces of vLLM 0.24 and 0.32; methods that only one of them calls say so.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from ...api.attention import attention_varlen
from ...api.decode import attention_decode
from ...errors import UnsupportedError
from ...masks import LAST
from . import cache

E4M3_CACHES = ("fp8", "fp8_e4m3")
CACHE_DTYPES = ["auto", "float16", "bfloat16", *E4M3_CACHES]
DECODER, ENCODERS = AttentionType.DECODER, (AttentionType.ENCODER, AttentionType.ENCODER_ONLY)


@dataclass
class OnepassMetadata:
    """A step of the engine: packed queries of all requests, and where their keys are.

    Attributes:
        num_actual_tokens: tokens of the step without padding.
        query_start_loc: (requests + 1,) int32, offsets of the requests' queries.
        max_query_len: the most queries of a request.
        seq_lens: (requests,) int32, keys of each request, those of this step included.
        block_table: (requests, blocks) int32.
        causal: whether a token sees only itself and the tokens before it.
        mm_prefix_range_tensor: (3, num_actual_tokens) int32: the position of each query, and the start and the end of
            the image that it belongs to, whose tokens see each other in both directions; None if no query belongs to
            one. Models that want no such images in some of their layers set this name to None there.
    """

    num_actual_tokens: int
    query_start_loc: Tensor
    max_query_len: int
    seq_lens: Tensor
    block_table: Tensor
    causal: bool
    mm_prefix_range_tensor: Tensor | None = None


class OnepassMetadataBuilder(AttentionMetadataBuilder[OnepassMetadata]):
    """Builds the metadata of a step from what vLLM has. No value is read from the device."""

    # A CUDA graph fixes the choice between the kernel for few queries of a request and the kernel for many.
    _cudagraph_support = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """What graphs may hold: of models with images in prompts, steps of single tokens, which see nothing ahead."""
        if vllm_config.model_config.is_mm_prefix_lm:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> OnepassMetadata:
        step = common_attn_metadata
        if not isinstance(step.causal, bool):
            raise UnsupportedError("onepass in vLLM: expected requests that are all causal or all not, got a mixture")
        return OnepassMetadata(
            step.num_actual_tokens,
            step.query_start_loc,
            step.max_query_len,
            step.seq_lens,
            step.block_table_tensor,
            step.causal,
            _images(step),
        )


def _images(step: Any) -> Tensor | None:
    """See `OnepassMetadata.mm_prefix_range_tensor`; of tokens that belong to no image, `LAST` and 0.

    vLLM has the first and the last position of each image, and upper bounds of lengths on the host that are exact for
    prompts, which is where images are. The positions of other queries follow from the lengths on the device.
    """
    if not step.mm_req_doc_ranges:
        return None
    offsets, lengths, n = step.query_start_loc, step.seq_lens, step.num_actual_tokens
    starts, bounds = step.query_start_loc_cpu.tolist(), step.seq_lens_cpu_upper_bound.tolist()
    images = torch.tensor((LAST, 0), dtype=torch.int32)[:, None].repeat(1, n)
    for request, ranges in step.mm_req_doc_ranges.items():
        start, end = starts[request : request + 2]
        shift = bounds[request] - end  # from rows to positions
        for first, last in ranges:
            rows = slice(max(first - shift, start), min(last + 1 - shift, end))
            if rows.start < rows.stop:
                images[0, rows], images[1, rows] = first, last + 1
    if not images[1].any():
        return None
    images = (images.pin_memory() if offsets.is_cuda else images).to(offsets.device, non_blocking=True)
    row = torch.arange(n, dtype=torch.int32, device=offsets.device)
    owner = torch.searchsorted(offsets[1:], row, right=True).clamp(max=len(lengths) - 1)
    return torch.cat(((row + (lengths - offsets[1:])[owner])[None], images))


class OnepassBackend(AttentionBackend):
    """Attention over vLLM's paged cache by `onepass.attention_decode`."""

    forward_includes_kv_cache_update = False
    accept_output_buffer = True
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = CACHE_DTYPES

    @staticmethod
    def get_name() -> str:
        from vllm.platforms import current_platform

        return "CPU_ATTN" if current_platform.is_cpu() else "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[OnepassImpl]:
        return OnepassImpl

    @staticmethod
    def get_builder_cls() -> type[OnepassMetadataBuilder]:
        return OnepassMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Called by vLLM 0.24, whose backends choose the layout of their caches."""
        return num_blocks, 2, block_size, num_kv_heads, head_size

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and head_size <= 256

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (DECODER, *ENCODERS)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return capability is None or capability >= (8, 0)


class OnepassImpl(AttentionImpl[OnepassMetadata]):
    """One attention layer of a model.

    Raises: UnsupportedError for what onepass does not compute in vLLM: cross attention, quantized caches other than
    e4m3, and ALiBi with a square root.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        use_alibi_sqrt: bool = False,
    ) -> None:
        if attn_type not in (DECODER, *ENCODERS):
            raise UnsupportedError(f"onepass in vLLM: expected decoder or encoder attention, got {attn_type}")
        if kv_cache_dtype not in CACHE_DTYPES:
            raise UnsupportedError(f"onepass in vLLM: expected a cache of {CACHE_DTYPES}, got {kv_cache_dtype!r}")
        if use_alibi_sqrt:
            raise UnsupportedError("onepass in vLLM: expected use_alibi_sqrt=False, got True")
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sliding_window = kv_cache_dtype, sliding_window
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.is_encoder, self.is_e4m3 = attn_type in ENCODERS, kv_cache_dtype in E4M3_CACHES
        self.sinks = sinks
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.options: dict[str, Any] = {
            "softmax_scale": self.scale,
            "softcap": logits_soft_cap or None,
            "window": None if sliding_window is None else (sliding_window - 1, sliding_window - 1),
        }

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Bring sinks, which are a weight, into the dtype that onepass takes."""
        if self.sinks is not None:
            self.sinks = self.sinks.float()

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Write the keys and values of a step to the cache. An encoder has no cache."""
        if not self.is_encoder:
            k_cache, v_cache = cache.keys_and_values(kv_cache, self.head_size, self.is_e4m3)
            cache.write(key, value, k_cache, v_cache, slot_mapping, layer._k_scale, layer._v_scale)

    def _with_images(self, images: Tensor, is_cut: bool) -> dict[str, Any]:
        """The options of a causal mask and a window, with images. Args: is_cut: whether the window hides their keys."""
        position, start, end = images
        low = torch.zeros_like(position)
        if self.sliding_window is not None:
            low = (position - self.sliding_window + 1).clamp(min=0)
        ranges = torch.stack((low if is_cut else low.minimum(start), end.maximum(position + 1)), -1)
        return {"causal": False, "window": None, "key_ranges": ranges[None]}

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: OnepassMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Attention of all requests of a step, written to `output`, whose rows past the step's tokens are padding.

        Args:
            query, key, value: (tokens, heads, head_size).
            output: (tokens, num_heads * head_size) or (tokens, num_heads, head_size).
        """
        if output_scale is not None or output_block_scale is not None:
            raise UnsupportedError("onepass in vLLM: expected no quantized output, got output_scale")
        if attn_metadata is None:  # vLLM measures memory with such a run
            return output.zero_()
        step, n = attn_metadata, attn_metadata.num_actual_tokens
        q = query[:n].view(n, self.num_heads, self.head_size)
        if self.alibi_slopes is not None:
            self.alibi_slopes = self.alibi_slopes.to(q.device)
        options = self.options | {"causal": step.causal, "sinks": self.sinks, "alibi_slopes": self.alibi_slopes}
        if self.is_encoder:
            k, v = (t[:n].view(n, self.num_kv_heads, self.head_size) for t in (key, value))
            offsets = step.query_start_loc
            out = attention_varlen(q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, **options)
        else:
            k, v = cache.keys_and_values(kv_cache, self.head_size, self.is_e4m3)
            if step.causal and step.mm_prefix_range_tensor is not None:
                # in vLLM 0.24 layers do not say that their window hides keys of a query's own image
                is_cut = getattr(layer, "mm_prefix_clamp_sliding_window", False)
                options |= self._with_images(step.mm_prefix_range_tensor, is_cut)
            if self.is_e4m3:
                options |= {"k_descale": layer._k_scale.view(()), "v_descale": layer._v_scale.view(())}
            out = attention_decode(
                q,
                k,
                v,
                cache_seqlens=step.seq_lens,
                page_table=step.block_table,
                cu_seqlens_q=step.query_start_loc,
                max_seqlen_q=step.max_query_len,
                **options,
            )
        output[:n].view(n, self.num_heads, self.head_size).copy_(out)
        return output
