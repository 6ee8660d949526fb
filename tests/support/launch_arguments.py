"""Helpers of the tests of backward launches."""

import torch

from onepass.problem import AttentionInputs


def assert_as_traced(wanted, launch, requests):
    """Check that a launch passes the arguments that its kernels were traced with.

    Their number, their dimensions and the positions of None must agree.

    Args:
        launch: (kernels) -> a BackwardLaunch with them, for 4 query and 2 kv heads of head_dim 16.
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
    lse = torch.zeros(4, 140) if wanted.is_packed else torch.zeros(2, 4, 70)
    given = []
    kernels = [lambda *arguments: given.append(arguments) for _ in requests]
    launch(kernels)(inputs, out, lse, dout, None)

    def dimensions(argument):
        return None if argument is None else len(getattr(argument, "shape", ()))

    for arguments, (*_, trace) in zip(given, requests, strict=True):
        _, stand_ins = trace()
        # the last stand-in is the stream, which a launch takes from torch
        assert [dimensions(a) for a in arguments] == [dimensions(a) for a in stand_ins[:-1]]
