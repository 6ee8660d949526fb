"""The random bits of dropout: the generator's published values, and what bits depend on."""

import pytest
import torch

from onepass.geometry import philox


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_values(counter, key, expected):
    """The known answers of Random123, the reference implementation."""
    words = philox.philox(tuple(map(torch.tensor, counter)), tuple(map(torch.tensor, key)))
    assert tuple(map(int, words)) == expected


def bits(seed=1, offset=2, instance=3, rows=40, columns=50, first_row=0):
    state = torch.tensor([seed, offset])
    i = torch.arange(first_row, first_row + rows)[:, None]
    return philox.dropout_bytes(state, torch.tensor(instance), i, torch.arange(columns))


def test_all_of_the_arguments_matter():
    usual = bits()
    for other in (bits(seed=2), bits(seed=1 + 2**40), bits(offset=3), bits(offset=2 + 2**33), bits(instance=4)):
        assert (usual == other).float().mean() < 0.02


def test_a_pair_keeps_its_bits_whatever_the_tile():
    usual = bits()
    assert torch.equal(bits(rows=7, columns=50, first_row=13), usual[13:20])
    assert torch.equal(bits(columns=9), usual[:, :9])


@pytest.mark.parametrize(("rows", "columns"), [((0, 64), (0, 32)), ((5, 41), (19, 120)), ((7, 8), (300, 301))], ids=str)
@pytest.mark.parametrize("dropout_p", [0.3, 0.001, 0.999])
@pytest.mark.parametrize("at_once", [1, 2**20])
def test_tiles_keep_the_same_pairs(rows, columns, dropout_p, at_once, monkeypatch):
    """Tiles that begin anywhere, with instances that are computed one by one or together; 0.001 keeps all pairs."""
    monkeypatch.setattr(philox, "COUNTERS", at_once)
    state = torch.tensor([-(2**62) + 12345, 2**61 + 678])
    instances = torch.tensor([0, 3, 2**31, 7])

    def empty(name, *shape):
        return torch.full(shape, -1)

    kept = philox.kept_tile(state, dropout_p, instances, rows, columns, torch.float64, empty)
    i, j = torch.arange(*rows)[:, None], torch.arange(*columns)
    assert torch.equal(kept, philox.kept_pairs(state, dropout_p, instances[:, None, None], i, j).double())


def test_bytes_are_uniform_and_independent():
    many = bits(rows=1024, columns=1024)
    counts = torch.bincount(many.flatten(), minlength=256).double()
    expected = many.numel() / 256
    chi_squared = float(((counts - expected) ** 2 / expected).sum())
    assert 160 < chi_squared < 370  # 255 degrees of freedom: five standard deviations
    centered = many.double() - 127.5
    for shift in ((0, 1), (1, 0), (0, 8), (8, 0), (1, 1), (8, 8), (0, 16), (16, 0)):
        correlation = float((centered * centered.roll(shift, (0, 1))).mean() / centered.square().mean())
        assert abs(correlation) < 5e-3, shift


@pytest.mark.parametrize(("dropout_p", "keep"), [(0.0, 256), (0.1, 230), (0.5, 128), (0.999, 1)])
def test_the_share_that_is_kept(dropout_p, keep):
    assert philox.keep_bytes(dropout_p) == keep
    assert philox.keep_scale(dropout_p) == 1 / (1 - dropout_p)
    kept = philox.kept_pairs(
        torch.tensor([5, 6]), dropout_p, torch.tensor(0), torch.arange(512)[:, None], torch.arange(512)
    )
    assert abs(float(kept.float().mean()) - keep / 256) < 5e-3
