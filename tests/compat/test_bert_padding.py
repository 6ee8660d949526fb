"""Packing padded batches: rows, indices, lengths and gradients."""

import pytest
import torch

from onepass.compat.upstream.bert_padding import (
    index_first_axis,
    index_first_axis_residual,
    index_put_first_axis,
    pad_input,
    unpad_input,
    unpad_input_for_concatenated_sequences,
)

MASK = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0], [0, 1, 1, 1]])


def hidden_states(*shape):
    return torch.arange(1.0, 1 + torch.Size(shape).numel(), dtype=torch.float64).view(shape)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.int32])
@pytest.mark.parametrize("rest", [(), (2,), (2, 3)])
def test_unpad_and_pad(dtype, rest):
    x = hidden_states(3, 4, *rest)
    packed, indices, cu_seqlens, longest, used = unpad_input(x, (3 * MASK).to(dtype))
    assert torch.equal(packed, x[MASK.bool()])
    assert indices.tolist() == [0, 1, 9, 10, 11]
    assert cu_seqlens.dtype == used.dtype == torch.int32
    assert cu_seqlens.tolist() == [0, 2, 2, 5]
    assert (longest, type(longest)) == (3, int)
    assert used.tolist() == [2, 0, 3]
    if rest:
        padded = pad_input(packed, indices, 3, 4)
        assert torch.equal(padded, x * MASK.view(3, 4, *(1 for _ in rest)))


def test_unused_rows_are_packed_and_not_counted():
    x = hidden_states(3, 4, 2)
    unused = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest, used = unpad_input(x, MASK, unused)
    assert indices.tolist() == [0, 1, 2, 4, 9, 10, 11]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), longest, used.tolist()) == ([0, 3, 4, 7], 3, [2, 0, 3])


def test_several_sequences_in_an_entry():
    x = hidden_states(3, 6, 2)
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [0, 0, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    packed, indices, cu_seqlens, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [*range(5), *range(12, 18)]
    assert torch.equal(packed, x.flatten(0, 1)[indices])
    assert (cu_seqlens.tolist(), cu_seqlens.dtype, longest) == ([0, 2, 5, 11], torch.int32, 6)


def test_sequences_that_an_entry_has_no_room_for():
    with pytest.raises(
        ValueError, match=r"attention_mask_in_length: expected lengths that sum to at most 4 .* sum of 6"
    ):
        unpad_input_for_concatenated_sequences(hidden_states(2, 4, 2), torch.tensor([[1, 3, 0, 0], [2, 4, 0, 0]]))


def test_no_tokens():
    packed, _, cu_seqlens, longest, _ = unpad_input(hidden_states(3, 4, 2), torch.zeros(3, 4))
    assert (packed.shape, cu_seqlens.tolist(), longest) == ((0, 2), [0, 0, 0, 0], 0)
    packed, _, cu_seqlens, longest = unpad_input_for_concatenated_sequences(
        hidden_states(3, 4, 2), torch.zeros(3, 4).int()
    )
    assert (packed.shape, cu_seqlens.tolist(), longest) == ((0, 2), [0], 0)
    for function in (unpad_input, unpad_input_for_concatenated_sequences):
        packed, _, cu_seqlens, longest, *_ = function(torch.ones(0, 4, 2), torch.zeros(0, 4).int())
        assert (packed.shape, cu_seqlens.tolist(), longest) == ((0, 2), [0], 0)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_gradients(dtype):
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([4, 0, 1], dtype=dtype)
    assert torch.autograd.gradcheck(lambda t: index_first_axis(t, indices), x)
    assert torch.autograd.gradcheck(lambda t: index_first_axis_residual(t, indices), x)
    (residual,) = torch.autograd.grad(index_first_axis_residual(x, indices)[1].sum(), x)
    assert (residual == 1).all()
    assert torch.autograd.gradcheck(lambda t: index_put_first_axis(t, indices, 7), x[:3].detach().requires_grad_())
    batch = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)

    def there_and_back(t):
        packed, indices, *_ = unpad_input(t, MASK)
        return pad_input(packed, indices.to(dtype), 3, 4)

    assert torch.autograd.gradcheck(there_and_back, batch)


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: unpad_input(torch.ones(3, 4, 2), torch.ones(3, 5)), r"attention_mask: expected shape .* got \(3, 5\)"),
        (lambda: unpad_input(torch.ones(3, 4, 2), MASK, MASK[:2]), "unused_mask: expected shape"),
        (lambda: unpad_input(torch.ones(3, 4, 2), MASK[..., None]), "attention_mask: expected shape"),
        (
            lambda: unpad_input_for_concatenated_sequences(torch.ones(3, 4), MASK.T),
            "attention_mask_in_length: expected",
        ),
        (lambda: index_first_axis(torch.ones(3), torch.tensor([0])), "input: expected at least 2 dimensions"),
        (lambda: index_first_axis(torch.ones(3, 2), torch.tensor([[0]])), "indices: expected 1 dimension"),
        (lambda: pad_input(torch.ones(3, 2), torch.tensor([0]), 1, 4), "values: expected 1 rows, one per index, got 3"),
    ],
)
def test_refusals(call, match):
    with pytest.raises(ValueError, match=match):
        call()
