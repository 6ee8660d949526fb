"""The Hopper forward in FP8: its machine code, the order of keys that P and V must share, and its scales."""

import functools
import itertools
import math
import re
from dataclasses import replace

import machine_code
import packages
import pytest
import torch
from shipped import problem

import onepass
from onepass.dispatch import attention as dispatch
from onepass.dispatch import backends
from onepass.errors import UnsupportedError
from onepass.kernels.config import ForwardConfigSm90, head_dim_tile
from onepass.kernels.heuristics import sm90 as heuristics
from onepass.kernels.launch import forward_sm90 as launch
from onepass.ops import quantize
from onepass.problem import Mask, Quantization
from onepass.quantization import dequantize

CAUSAL = Mask(None, 0)
# whether lse is used, head_dim, whether the mask is causal, queries up to which the kernel transposes V
TRANSPOSING = [
    (exact_lse, head_dim, is_causal, queries)
    for exact_lse, table in ((False, heuristics.TRANSPOSED_QUERIES), (True, heuristics.TRANSPOSED_QUERIES_EXACT))
    for head_dim, most in table.items()
    for is_causal, queries in enumerate(most)
]


def asked(head_dim, head_dim_v, out_dtype=torch.bfloat16, exact_lse=False, **options):
    quantization = Quantization(out_dtype, 64, 64, exact_lse=exact_lse)
    return replace(problem(head_dim, head_dim_v, **options), dtype=torch.float8_e4m3fn, quantization=quantization)


@pytest.mark.sampled(quick=0, slow=3)
@packages.needs_compiler
@packages.needs_disassembler
@pytest.mark.parametrize("exact_lse", [False, True])
@pytest.mark.parametrize("keys_last", [False, True])
@pytest.mark.parametrize(
    "question",
    [
        pytest.param(asked(128, 128, mask=Mask()), id="128"),
        pytest.param(asked(256, 256, mask=Mask(70, 30), softcap=30.0, has_seqused_k=True), id="256 window softcap"),
        pytest.param(asked(64, 64, mask=CAUSAL, is_packed=True), id="64 causal packed"),
        pytest.param(
            asked(
                256, 64, torch.float16, mask=CAUSAL, softcap=30.0, has_sinks=True, has_seqused_k=True, num_heads_kv=2
            ),
            id="256/64 causal softcap sinks seqused GQA",
        ),
    ],
)
def test_machine_code(question, keys_last, exact_lse):
    quantization = replace(question.quantization, v_keys_last=keys_last, exact_lse=exact_lse)
    question = replace(question, quantization=quantization)
    config = heuristics.forward_config_sm90(question)
    assert config.p_codes != exact_lse
    assert config.transposes_v != keys_last
    code = machine_code.read(launch.ARCH, functools.partial(launch.trace, question, config))
    assert code.serialized == ""
    assert code.spills == 0
    assert code.count(rf"QGMMA\.64x{config.tile_n}x32\.F32\.E4M3\.E4M3") > 0
    assert code.count("HGMMA") == 0
    # without overlap rows are stored in two places: beside the first S of the next tile, and at the end
    stores = 1 if config.overlap_gemm_softmax or not config.overlap_tiles else 2
    if question.softcap is None:  # multiplications: O where it is rescaled in each loop, O at the end; none of scores
        loops = 1 + (question.mask.window_left is not None) + (question.mask.window_right is not None)
        # of codes: a factor and a shift for each of two rows and each group of keys, in each softmax
        others = 40 + (loops + 2) * 4 * (config.tile_n // math.gcd(config.tile_n, 64))
        assert code.count("FMUL") < (loops + stores) * head_dim_tile(question.head_dim_v) // 2 + others
    # P: of two scores into float16, of four into e4m3; exponentials only where a reference changes, and of sinks
    assert code.count(r"F2FP\.\S*E4M3") > 0
    if config.p_codes:
        assert code.count(r"F2FP\.RELU\.F16") == code.count(r"F2FP\.\S*E4M3")
        assert code.count(r"MUFU\.EX2") <= 2 * (4 + stores) + (64 * (stores + 4) if question.softcap is not None else 0)
    assert code.count("UTMALDG") >= config.num_warpgroups + 2
    # scales, maxima, sums and out, for widest heads 64 of them: none for P
    assert code.count("SHFL") <= 64 * (1 + stores) + (2 if config.transposes_v else 0)
    # V, if it comes in rows: loads and stores of 32 keys times 16 columns, of half the columns by each of two warps
    units = head_dim_tile(question.head_dim_v) // 16 * config.tile_n // 32 // 2 if config.transposes_v else 0
    assert (code.count("LDSM"), code.count("STSM")) == (units, units)
    assert code.count(r"WARPGROUP\.ARRIVE") < code.count("QGMMA")


@pytest.mark.sampled(quick=0, slow=5)
@packages.needs_compiler
@packages.needs_disassembler
@pytest.mark.parametrize("is_packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("case", TRANSPOSING, ids=str)
def test_machine_code_of_warps_that_transpose(request, case, is_packed):
    """The registers are enough for the warps that transpose, and for those beside them."""
    exact_lse, head_dim, is_causal, seqlen = case
    if (exact_lse, head_dim, is_causal, is_packed) == (True, 64, 1, False):
        request.applymarker(pytest.mark.xfail(strict=True, reason="three warpgroups lack registers beside these warps"))
    options = {"mask": CAUSAL if is_causal else Mask(), "is_packed": is_packed, "seqlen": seqlen}
    question = asked(head_dim, head_dim, exact_lse=exact_lse, **options)
    config = heuristics.forward_config_sm90(question)
    assert config.transposes_v
    code = machine_code.read(launch.ARCH, functools.partial(launch.trace, question, config))
    assert (code.serialized, code.spills_in_gemms) == ("", 0)
    # three warpgroups of head_dim 128 hold O, and S or P V, in 128 of 160 registers: a step spills up to two values
    assert code.spills <= (48 if head_dim == 128 and config.num_warpgroups == 3 else 0)
    assert code.count("STSM") > 0


def test_p_and_v_have_the_same_order_of_keys():
    """An accumulator value must go, by the layouts of wgmma, to the position at which its key of V is stored."""
    # the accumulator: lane q of a quad holds the keys 2q, 2q + 1 of every eight, as columns 0, 1, 2, 3, ... of its row
    key_of_column = [[8 * (c // 2) + 2 * q + c % 2 for c in range(16)] for q in range(4)]  # keys of a tile of 64
    # operand A of e4m3: register `half` of step k holds, from its lowest byte, positions 32k + 16 half + 4q + (0 to 3)
    position_of_key = {}
    for q in range(4):
        for k in range(2):
            for half in range(2):
                for i in range(4):  # filled like in `scaled.pack_p`
                    key = key_of_column[q][8 * k + 4 * half + i]
                    position_of_key[key] = 32 * k + 16 * half + 4 * q + i
    assert sorted(position_of_key.values()) == list(range(64))
    v = torch.arange(64).view(1, 64, 1, 1).to(torch.uint8).view(torch.float8_e4m3fn)
    stored = quantize.keys_last(v).view(torch.uint8).flatten().tolist()
    assert stored == [key for key, _ in sorted(position_of_key.items(), key=lambda item: item[1])]


@pytest.mark.parametrize("granularity", ["block", "head", "tensor"])
def test_scales_of_the_kernel_are_those_of_the_tensors(granularity):
    q, k, v = torch.randn(2, 100, 4, 16), torch.randn(2, 150, 2, 16), torch.randn(2, 150, 2, 32) * 3
    quantized = onepass.quantize_fp8(q, k, v, granularity=granularity)
    question = replace(asked(16, 32), batch=2, num_heads_kv=2, quantization=quantized.quantization)
    *scales, q_block = launch.kernel_scales(question, quantized.descales)
    kv_block = 64
    for scale, descale, block, kernel_block, t in (
        (scales[0], quantized.q_descale, quantized.q_block, q_block, q),
        (scales[1], quantized.k_descale, quantized.kv_block, kv_block, k),
        (scales[2], quantized.v_descale, quantized.kv_block, kv_block, v),
    ):
        assert scale.data_ptr() == descale.data_ptr()  # a view
        assert scale.stride(-1) == 1
        rows = torch.arange(t.shape[1])
        found = scale[
            :, :, (rows // kernel_block).clamp(max=scale.shape[2] - 1)
        ]  # read like in blocks/softmax/scaled.py
        expected = dequantize.row_scales(t, descale, block, None).expand(*t.shape[:3], 1)[..., 0].transpose(1, 2)
        assert torch.equal(found, expected)


def test_scales_of_packed_sequences():
    """In the view of sequence b, its n-th block has the number `first_block` + n."""
    offsets = {n: torch.tensor([0, 70, 70, 100, 250], dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")}
    tensors = [torch.randn(253, heads, 16) for heads in (4, 2, 2)]
    for granularity in ("block", "head", "tensor"):
        quantized = onepass.quantize_fp8(*tensors, granularity=granularity, **offsets)
        question = replace(asked(16, 16, is_packed=True), batch=4, num_heads_kv=2, quantization=quantized.quantization)
        *scales, q_block = launch.kernel_scales(question, quantized.descales)
        for scale, descale, block, kernel_block, t in (
            (scales[0], quantized.q_descale, quantized.q_block, q_block, tensors[0]),
            (scales[2], quantized.v_descale, quantized.kv_block, 64, tensors[2]),
        ):
            assert scale.data_ptr() == descale.data_ptr()
            expected = dequantize.row_scales(t, descale, block, offsets["cu_seqlens_k"]).expand(253, t.shape[1], 1)[
                ..., 0
            ]
            for b, (start, end) in enumerate(itertools.pairwise(offsets["cu_seqlens_k"].tolist())):
                rows = torch.arange(end - start)
                blocks = (start // kernel_block + b + rows // kernel_block).clamp(max=scale.shape[2] - 1)
                assert torch.equal(scale[b][:, blocks].T, expected[start:end])


@pytest.mark.parametrize("head_dim", [16, 64, 96, 128, 192, 256])
def test_a_configuration_for_every_head_dim(head_dim):
    for mask, exact_lse, seqlen in itertools.product((Mask(), CAUSAL), (False, True), (512, 4096, 8192)):
        question = asked(head_dim, head_dim, exact_lse=exact_lse, mask=mask, seqlen=seqlen)
        config = heuristics.forward_config_sm90(question)
        config.check(question)
        # which tests on a GPU assume of the error of P
        assert config.p_codes != exact_lse
        assert config.rescale_threshold == heuristics.FP8_OVERLAPPED.rescale_threshold
        assert launch.unsupported(question) is None


REFUSED = [
    (asked(128, 128, torch.float32), r"dtype: expected out in bfloat16 or float16, got float32"),
    (asked(128, 40), r"head_dim_v: expected a multiple of 16 in FP8 .* got 40"),
    (replace(asked(128, 128), quantization=Quantization(torch.half, 1, 1)), r"kv_block: expected 64 or None, got 1"),
]


@pytest.mark.parametrize(("question", "message"), REFUSED, ids=lambda x: x if isinstance(x, str) else "")
def test_what_the_kernel_does_not_take(question, message):
    assert re.search(message, launch.unsupported(question))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ForwardConfigSm90(tile_n=80), r"tile_n: expected a multiple of 32 in FP8, got 80"),
        (
            ForwardConfigSm90(tile_n=128, rescale_threshold=8.0),
            r"rescale_threshold: expected 0 to 3.8 in FP8, .* got 8.0",
        ),
        (ForwardConfigSm90(tile_n=128, score_buffers=2), "score_buffers: expected 1 in FP8"),
        (
            ForwardConfigSm90(tile_n=64, transposes_v=True, cluster_size=2),
            "transposes_v: it needs warp_specialized and cluster_size=1",
        ),
    ],
    ids=str,
)
def test_configurations_that_do_not_fit(config, message):
    with pytest.raises(UnsupportedError, match=message):
        config.check(asked(128, 128))


def test_codes_are_for_fp8():
    ForwardConfigSm90(tile_n=64, p_codes=True).check(asked(128, 128))
    for question in (problem(128, 128), problem(128, 128, dtype=torch.float32)):
        with pytest.raises(UnsupportedError, match=r"p_codes: expected False for torch\.\w+, since P is"):
            ForwardConfigSm90(tile_n=32, p_codes=True).check(question)


def test_codes_are_refused_where_lse_is_used():
    config = ForwardConfigSm90(tile_n=64, p_codes=True)
    with pytest.raises(UnsupportedError, match="p_codes: expected False where lse or a gradient is used"):
        config.check(asked(128, 128, exact_lse=True))
    with pytest.raises(UnsupportedError, match="p_codes: expected False where lse or a gradient is used"):
        launch.prepare(asked(128, 128, exact_lse=True), torch.device("cuda"), config)


def test_registers_beside_warps_that_transpose():
    """A consumer thread keeps its 240 registers where it needs them; others leave some for loads ahead of stores."""
    needs_them = ForwardConfigSm90(tile_n=128, two_level_sums=True, p_codes=True, transposes_v=True)
    assert needs_them.registers_to_transpose(asked(128, 128)) == (24, 240)
    assert needs_them.registers_to_transpose(asked(64, 64)) == (40, 232)
    assert replace(needs_them, p_codes=False).registers_to_transpose(asked(128, 128)) == (24, 240)
    in_sequence = replace(needs_them, overlap_gemm_softmax=False)
    assert in_sequence.registers_to_transpose(asked(128, 128)) == (40, 232)
    assert replace(in_sequence, num_warpgroups=3).registers_to_transpose(asked(128, 128)) == (32, 160)
    assert replace(in_sequence, tile_n=64, num_warpgroups=4).registers_to_transpose(asked(64, 64)) == (32, 112)


def test_v_that_is_not_transposed():
    config = ForwardConfigSm90(tile_n=64, transposes_v=True)
    config.check(asked(128, 128))
    last = replace(asked(128, 128), quantization=Quantization(torch.bfloat16, 64, 64, v_keys_last=True))
    for question in (last, problem(128, 128)):
        with pytest.raises(
            UnsupportedError, match=r"transposes_v: it needs V in FP8, as \(batch, seqlen, heads, dim\)"
        ):
            config.check(question)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 192, 256])
def test_who_transposes_v(head_dim):
    """The forward transposes V for few queries, if V lies in rows; otherwise V is laid out before."""
    width = 64 if head_dim == 64 else 128 if head_dim <= 128 else 256
    bounds = heuristics.TRANSPOSED_QUERIES[width], heuristics.TRANSPOSED_QUERIES_EXACT[width]
    for (exact_lse, most), is_causal in itertools.product(enumerate(bounds), (False, True)):
        bound = most[is_causal]
        for seqlen in (512, bound, bound + 1):
            mask = CAUSAL if is_causal else Mask()
            question = asked(head_dim, head_dim, exact_lse=bool(exact_lse), mask=mask, seqlen=seqlen)
            config = heuristics.forward_config_sm90(question)
            config.check(question)
            assert config.transposes_v == (seqlen <= bound)
            last = replace(question, quantization=replace(question.quantization, v_keys_last=True))
            assert not heuristics.forward_config_sm90(last).transposes_v


def test_buffers_for_rows_of_v():
    fits_one = ForwardConfigSm90(tile_n=128, q_stages=2, transposes_v=True)
    assert fits_one.raw_stages(asked(256, 256)) == 1
    assert fits_one.raw_stages(asked(128, 128)) == 2
    assert replace(fits_one, transposes_v=False).raw_stages(asked(128, 128)) == 0
    assert fits_one.smem_bytes(asked(256, 256)) == 7 * 32 * 1024 + 1024


def test_hopper_runs_it_by_itself(monkeypatch):
    monkeypatch.setattr(backends, "_HAS_KERNEL_COMPILER", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    assert dispatch.choose(asked(128, 128)).backend == "sm90"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert dispatch.choose(asked(128, 128)).backend == "tiled"
