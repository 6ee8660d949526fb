"""The Hopper forward over a cache, in splits and pages: everything stays in registers, and loads go by TMA."""

from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import problem

from onepass.kernels.config import HOPPER, SMEM_BYTES
from onepass.kernels.launch import decode_sm90 as decode_launch
from onepass.problem import Mask
from onepass.problem.decode import DecodeProblem

pytestmark = packages.needs_machine_code

PACKED = {"is_packed": True, "seqlen_q": 5000}
OPTIONS = {"mask": Mask(60, 0), "softcap": 20.0, "dtype": torch.float16, "has_sinks": True}


E4M3 = {"kv_dtype": torch.float8_e4m3fn}


def code_of(
    head_dims: tuple[int, int], page_size: int | None, is_split: bool, has_descales: bool = False, **changes
) -> tuple:
    """The machine code of the forward that a call gets, and its configuration."""
    sizes = {"seqlen_q": 16, "num_heads_q": 16, "num_heads_kv": 2, "mask": Mask(None, 0)}
    attention = replace(problem(*head_dims), has_seqused_k=True, **(sizes | changes))
    asked = DecodeProblem(attention, page_size, has_descales=has_descales)
    assert decode_launch.unsupported(asked) is None
    config = decode_launch.config_of(asked, torch.device("cpu"))
    config.check(attention)
    code = machine_code.read(HOPPER, decode_launch.compile_request(asked, config, is_split)[3])
    assert (code.spills, code.serialized) == (0, "")
    (smem,) = code.dynamic_smem
    assert smem <= config.smem_bytes(attention) <= SMEM_BYTES
    # partials are stored two columns at a time, out eight (16 bits)
    assert (code.count(r"STG\.E\.64") > 0) == is_split
    assert (code.count(r"STG\.E\.128") > 0) == (not is_split)
    return code, config


@pytest.mark.sampled(quick=0, slow=1)
@pytest.mark.parametrize(
    ("page_size", "boxes"),
    [(16, 8), (None, 1), (256, 1)],
)
def test_loads(page_size, boxes):
    """Boxes come in two halves of 64 columns: K at a tile's start and in the loop, V at the very end as well."""
    code, config = code_of((128, 128), page_size, True)
    assert (config.num_warpgroups, config.tile_n) == (2, 128)
    in_q = 2 * config.num_warpgroups  # 64 columns of 64 rows
    assert code.count("UTMALDG") == in_q + 2 * boxes * (2 + 3)


@pytest.mark.sampled(quick=0, slow=4)
@pytest.mark.parametrize(
    ("head_dims", "page_size", "is_split", "changes"),
    [
        ((64, 64), 64, False, {"seqlen_q": 300}),
        ((64, 64), 16, True, {"seqlen_q": 300} | OPTIONS),
        ((128, 128), None, False, OPTIONS),
        ((128, 128), 16, True, OPTIONS | {"seqlen_q": 8}),
        ((96, 96), 48, True, {}),
        ((192, 128), 16, True, OPTIONS),
        ((256, 256), 16, True, OPTIONS),
        ((256, 256), None, False, {"mask": Mask(), "seqlen_q": 8}),
        ((64, 64), 16, False, PACKED | OPTIONS),
        ((256, 256), None, True, PACKED | {"mask": Mask()}),
        ((128, 128), 64, True, PACKED),
    ],
)
def test_configurations(head_dims, page_size, is_split, changes):
    code, config = code_of(head_dims, page_size, is_split, **changes)
    has_third = head_dims[0] == 64 and "softcap" not in changes and "is_packed" not in changes
    assert config.num_warpgroups == (3 if has_third else min(2, config.num_warpgroups))
    assert code.count("HGMMA") > 0


@pytest.mark.sampled(quick=0, slow=3)
@pytest.mark.parametrize(
    ("head_dims", "page_size", "is_split", "has_descales", "changes"),
    [
        ((64, 64), 16, False, True, PACKED),
        ((64, 64), 64, True, True, PACKED | OPTIONS),
        ((96, 96), 48, False, True, PACKED | OPTIONS | {"dtype": torch.bfloat16}),
        ((128, 128), 16, False, True, PACKED),
        ((128, 128), None, True, True, PACKED),
        ((128, 128), 64, False, True, PACKED | OPTIONS),
        ((128, 128), 16, True, True, OPTIONS),
        ((128, 64), None, True, False, {"mask": Mask()}),
        ((128, 128), 16, False, True, {"seqlen_q": 8}),
    ],
)
def test_e4m3_cache(head_dims, page_size, is_split, has_descales, changes):
    """A lane converts a row of K and of V, and stores them; 16-bit q takes no conversion."""
    code, config = code_of(head_dims, page_size, is_split, has_descales, **changes, **E4M3)
    assert config.num_warpgroups == (1 if changes.get("seqlen_q") == 8 else 2)
    columns = sum(head_dims)
    # one for two numbers; some for rows that are computed again
    assert columns // 2 <= code.count(r"F2FP\.F16\.E4M3\.UNPACK_B") <= columns // 2 + 16
    assert code.count(r"LDS\.128") == columns // 16
    assert code.count(r"STS\.128") == columns // 8 + 1  # .. and the zeros after the last key
