"""Helpers of the tests of backward launches."""

import functools

import torch

from onepass.problem import AttentionInputs, ModifiedInputs, Modifiers


def assert_as_traced(wanted, launch, requests):
    """Check that a launch passes the arguments that its kernels were traced with.

    Their number, their dimensions and the positions of None must agree.

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
        }
        inputs = ModifiedInputs(*inputs, Modifiers(**given))
    lse = torch.zeros(4, 140) if wanted.is_packed else torch.zeros(2, 4, 70)
    passed = {}
    kernels = {request.name: functools.partial(keep, passed, request.name) for request in requests}
    launch(kernels)(inputs, out, lse, dout, None)

    def dimensions(argument):
        if isinstance(argument, tuple):
            return [dimensions(a) for a in argument]
        return None if argument is None else len(getattr(argument, "shape", ()))

    assert list(passed) == [request.name for request in requests], "kernels run in the order of their requests"
    for name, _, _, trace in requests:
        _, stand_ins = trace()
        # the last stand-in is the stream, which a launch takes from torch
        assert dimensions(passed[name]) == dimensions(stand_ins[:-1]), name


def keep(passed: dict, name: str, *arguments):
    assert name not in passed
    passed[name] = arguments
