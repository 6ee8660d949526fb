"""vLLM's caches as views for onepass, and writing to them; vLLM itself is not needed."""

import sys
from types import SimpleNamespace

import pytest
import torch

from onepass.integrations.vllm import cache

LAYOUTS = {
    "up to 0.24": (
        torch.arange(3 * 2 * 4 * 2 * 8.0).view(3, 2, 4, 2, 8),
        lambda c, p, r, h: (c[p, 0, r, h], c[p, 1, r, h]),
    ),
    "from 0.32": (torch.arange(3 * 2 * 4 * 16.0).view(3, 2, 4, 16), lambda c, p, r, h: c[p, h, r].chunk(2)),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_views(name):
    whole, part_of = LAYOUTS[name]
    k, v = cache.keys_and_values(whole, 8, False)
    assert k.shape == v.shape == (3, 4, 2, 8)
    assert k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
    for page, row, head in ((0, 0, 0), (2, 3, 1), (1, 2, 0)):
        expected = part_of(whole, page, row, head)
        assert torch.equal(k[page, row, head], expected[0])
        assert torch.equal(v[page, row, head], expected[1])


@pytest.mark.parametrize("shape", [(3, 4, 2, 8), (2, 3, 4, 2, 8), (3, 2, 4, 2, 9)])
def test_other_layouts_are_refused(shape):
    with pytest.raises(ValueError, match=r"kv_cache: expected .*, got"):
        cache.keys_and_values(torch.zeros(shape), 8, False)


@pytest.mark.parametrize("is_e4m3", [False, True])
@pytest.mark.parametrize("name", LAYOUTS)
def test_writing(name, is_e4m3):
    """Tokens go to their slots, and padding nowhere. An e4m3 cache has values divided by descales, and clamped."""
    whole = LAYOUTS[name][0].clone()
    whole = torch.zeros_like(whole, dtype=torch.uint8) if is_e4m3 else whole.fill_(-1.0)
    k, v = cache.keys_and_values(whole, 8, is_e4m3)
    key, value = torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    key[1, 0, 0], value[3, 1, 2] = 1e4, -1e4
    slots = torch.tensor([9, 0, -1, 6])  # the fifth token is padding past the slots
    descales = torch.tensor(0.5), torch.tensor(2.0)
    cache.write(key, value, k, v, slots, *descales)
    for t, new, descale in ((k, key, descales[0]), (v, value, descales[1])):
        rows = t.reshape(-1, 2, 8).float()
        for token, slot in ((0, 9), (1, 0), (3, 6)):
            expected = (new[token] / descale).clamp(-448, 448).to(cache.E4M3).float() if is_e4m3 else new[token]
            assert torch.equal(rows[slot], expected)
        others = [slot for slot in range(12) if slot not in (9, 0, 6)]
        assert (rows[others] == (0 if is_e4m3 else -1)).all()


@pytest.mark.parametrize("is_e4m3", [False, True])
def test_a_gpu_writes_with_the_kernel_of_vllm(is_e4m3, monkeypatch):
    given = []
    kernels = SimpleNamespace(reshape_and_cache_flash=lambda *arguments: given.append(arguments))
    monkeypatch.setitem(sys.modules, "vllm._custom_ops", kernels)
    whole = torch.zeros(3, 2, 4, 2, 8, dtype=torch.uint8 if is_e4m3 else torch.float32)
    k, v = cache.keys_and_values(whole, 8, is_e4m3)
    key = SimpleNamespace(is_cuda=True)
    cache.write(key, "value", k, v, "slots", "k_descale", "v_descale")
    ((found_key, value, k_cache, v_cache, *rest),) = given
    assert (found_key, value) == (key, "value")
    assert rest == ["slots", "fp8_e4m3" if is_e4m3 else "auto", "k_descale", "v_descale"]
    for found, view in ((k_cache, k), (v_cache, v)):
        assert found.dtype == whole.dtype
        assert (found.data_ptr(), found.shape, found.stride()) == (view.data_ptr(), view.shape, view.stride())
