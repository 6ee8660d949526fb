"""Helpers of the tests of backward launches."""

import functools

import torch

from onepass.kernels.launch import block_lists
from onepass.kernels.launch.arguments import element_type
from onepass.problem import AttentionInputs, Blocks, Modifiers


def assert_as_traced(wanted, launch, requests):
    """Check that a launch passes the arguments that its kernels were traced with.

    Their number, their dimensions and types, and the positions of None must agree.

    Args:
        launch: (kernels, by the names of their requests) -> a BackwardLaunch with them, for 4 query and 2 kv heads of
            head_dim 16.
        requests: a compile request for each kernel, in order.
    """
    sequences = (140,) if wanted.is_packed else (2, 70)
    q, out, dout = (torch.zeros(*sequences, 4, 16, dtype=wanted.dtype) for _ in range(3))
    k, v = (torch.zeros(*sequences, 2, 16, dtype=wanted.dtype) for _ in range(2))
    lengths = torch.tensor([0, 70, 140], dtype=torch.int32)
    inputs = AttentionInputs(
        q,
        k,
        v,
        sinks=torch.zeros(4) if wanted.has_sinks else None,
        cu_seqlens_q=lengths if wanted.is_packed else None,
        cu_seqlens_k=lengths if wanted.is_packed else None,
        seqused_k=lengths[:2] if wanted.has_seqused_k else None,
    )
    if wanted.has_modifiers:
        rows = () if wanted.is_packed else (2,)
        given = {
            "seqstart_k": lengths[:2] if wanted.has_seqstart_k else None,
            "key_ranges": lengths.new_zeros(*rows, 4, sequences[-1], 2) if wanted.has_key_ranges else None,
            "q_positions": lengths.new_zeros(*sequences) if wanted.has_q_positions else None,
            "alibi_slopes": torch.zeros(4) if wanted.has_alibi else None,
            "bias": torch.zeros(*rows, 4, *sequences[-1:] * 2, dtype=wanted.bias_dtype) if wanted.has_bias else None,
            "query_ranges": lengths.new_zeros(*rows, 4, sequences[-1], 2) if wanted.has_query_ranges else None,
            "dropout_state": torch.zeros(2, dtype=torch.int64) if wanted.dropout_p else None,
        }
        blocks = None
        if wanted.block_size is not None:
            bits = lengths.new_zeros(1, 1, sequences[-1], 5) if wanted.has_block_bits else None
            blocks = Blocks(torch.zeros(2, 4, 3, 3, dtype=torch.int8), wanted.block_size, bits)
        inputs = inputs._replace(modifiers=Modifiers(**given), blocks=blocks)
    lse = torch.zeros(4, 140) if wanted.is_packed else torch.zeros(2, 4, 70)
    passed = {}
    kernels = {request.name: functools.partial(keep, passed, request.name) for request in requests}
    launch(kernels)(inputs, out, lse, dout, None)

    assert list(passed) == [request.name for request in requests], "kernels run in the order of their requests"
    for name, _, _, trace in requests:
        _, stand_ins = trace()
        # the last stand-in is the stream, which a launch takes from torch
        assert described(passed[name]) == described(stand_ins[:-1]), name


def lists_by(kernels, wanted, config):
    """What a launch of a backward gets as `block_lists`; None if its requests have no such kernel."""
    if "block_lists" not in kernels:
        return None
    kernel = block_lists.kernel_of(wanted, (config.tile_m, config.tile_n), True)
    return functools.partial(block_lists.with_lists, kernels["block_lists"], kernel, wanted)


def described(argument):
    """The dimensions and the type of a tensor, or of what stands for one, and the type of a number."""
    import cutlass

    if isinstance(argument, tuple):
        return [described(a) for a in argument]
    if argument is None:
        return None
    if isinstance(argument, torch.Tensor):
        integers = {torch.int32: cutlass.Int32, torch.int16: cutlass.Int16, torch.int8: cutlass.Int8}
        return argument.dim(), integers.get(argument.dtype) or element_type(argument.dtype)
    if hasattr(argument, "shape"):
        return len(argument.shape), argument.element_type
    return cutlass.Int32 if isinstance(argument, (int, cutlass.Int32)) else cutlass.Float32


def keep(passed: dict, name: str, *arguments):
    assert name not in passed
    passed[name] = arguments
