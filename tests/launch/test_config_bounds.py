"""The values that configurations accept: each field alone, from below the least value to above the largest one."""

from dataclasses import replace

import pytest
import torch

from onepass.errors import UnsupportedError
from onepass.kernels.config import (
    REGISTERS,
    REGISTERS_OF_PAGES,
    REGISTERS_OF_SEVERAL,
    BackwardConfigSm80,
    BackwardConfigSm90,
    ForwardConfigSm80,
    ForwardConfigSm90,
)
from onepass.kernels.config.decode import DecodeConfigSm80
from onepass.problem import AttentionProblem, Mask, Quantization

PROBLEM = AttentionProblem(torch.bfloat16, "cuda", 2, 300, 500, 8, 2, 64, 64, softmax_scale=0.25, mask=Mask())
FP8 = {"dtype": torch.float8_e4m3fn, "quantization": Quantization(torch.bfloat16, 64, 64)}
IN_TURNS = {"deterministic": True, "has_key_ranges": True}
FORWARD_SM80, DECODE = ForwardConfigSm80(tile_n=32), DecodeConfigSm80(key_warps=2)
FORWARD_SM90 = ForwardConfigSm90(64)
ONE_WARPGROUP = replace(FORWARD_SM90, num_warpgroups=1)
FP8_SUMS = replace(FORWARD_SM90, two_level_sums=True, overlap_gemm_softmax=False)
NO_PRODUCER = ForwardConfigSm90(64, warp_specialized=False, overlap_tiles=False)
BY_QUERIES = BackwardConfigSm90(by_queries=True, q_stages=4)
# a configuration, a field, the values that are tried, those that are accepted, and what the problem is otherwise
CASES = (
    (FORWARD_SM80, "num_warps", range(17), {2, 4}, {}),
    (FORWARD_SM80, "tile_m", range(16, 260, 16), {64, 128}, {}),
    (FORWARD_SM80, "tile_n", range(8, 216, 8), set(range(16, 216, 16)), {}),
    (FORWARD_SM80, "num_stages", range(4), {1, 2, 3}, {}),
    (FORWARD_SM80, "rescale_threshold", (-0.5, 0.0, 15.0, 15.5), {0.0, 15.0}, {}),
    (FORWARD_SM80, "vector_bytes", (1, 2, 4, 8, 16, 32), {2, 4, 8, 16}, {}),
    (FORWARD_SM80, "vector_bytes", (4, 8, 16), {4, 8}, {"head_dim": 20}),
    (FORWARD_SM80, "vector_bytes", (2, 4, 8, 16), {2}, {"head_dim_v": 33}),
    (FORWARD_SM80, "pack_gqa", (False, True), {False}, {"num_heads_q": 130}),
    (FORWARD_SM80, "pack_gqa", (False, True), {False, True}, {"num_heads_q": 128}),
    (DECODE, "num_warps", range(1, 4), {1}, {}),
    (DECODE, "tile_n", range(8, 80, 8), {16, 32}, {}),
    (DECODE, "key_warps", range(17), {1, 2, 4}, {}),
    (replace(DECODE, tile_n=32), "key_warps", range(17), {1, 2}, {}),
    (DECODE, "num_stages", range(5), {2, 3, 4}, {}),
    (DECODE, "prefetch", (False, True), {True}, {}),
    (BackwardConfigSm80(), "tile_m", range(16, 260, 16), {64, 128}, {}),
    (BackwardConfigSm80(), "tile_n", range(16, 400, 16), {128}, {}),
    (BackwardConfigSm80(), "num_stages", range(5), {1, 2}, {}),
    (BackwardConfigSm80(), "s_key_warps", range(17), {2, 4, 8}, {}),
    (BackwardConfigSm80(), "dkv_key_warps", range(17), {4, 8}, {}),
    (BackwardConfigSm80(), "dq_query_warps", range(17), {2, 4}, {}),
    (BackwardConfigSm80(), "vector_bytes", (1, 2, 4, 8, 16, 32), {2, 4, 8, 16}, {}),
    (FORWARD_SM90, "num_warpgroups", range(7), {1, 2, 3, 4}, {}),
    (FORWARD_SM90, "tile_n", range(8, 300, 8), set(range(16, 257, 16)), {}),
    (FORWARD_SM90, "tile_n", range(16, 257, 16), set(range(32, 257, 32)), FP8),
    (FORWARD_SM90, "num_stages", range(5), {2, 3, 4}, {}),
    (replace(FORWARD_SM90, overlap_gemm_softmax=False, overlap_tiles=False), "num_stages", range(3), {1, 2}, {}),
    (FORWARD_SM90, "v_stages", range(4), {0, 2, 3}, {}),
    (FORWARD_SM90, "q_stages", range(4), {1, 2}, {}),
    (FORWARD_SM90, "score_buffers", range(4), {1, 2}, {}),
    (FORWARD_SM90, "score_buffers", (1, 2), {1}, FP8),
    (FORWARD_SM90, "score_buffers", (1, 2), {1}, {"dtype": torch.float32}),
    (FORWARD_SM90, "score_buffers", (1, 2), {1}, {"has_alibi": True}),
    (replace(FORWARD_SM90, overlap_tiles=False), "score_buffers", (1, 2), {1}, {}),
    (replace(FORWARD_SM90, two_level_sums=True), "score_buffers", (1, 2), {1}, {}),
    (replace(FORWARD_SM90, overlap_gemm_softmax=False), "overlap_tiles", (False, True), {False}, {}),
    (FP8_SUMS, "overlap_tiles", (False, True), {False, True}, {}),
    (FORWARD_SM90, "cluster_size", range(4), {1, 2}, {}),
    (FORWARD_SM90, "cluster_size", (1, 2), {1}, {"is_packed": True}),
    (FORWARD_SM90, "cluster_size", (1, 2), {1}, {"has_seqstart_k": True}),
    (replace(FORWARD_SM90, dynamic_tiles=True), "cluster_size", (1, 2), {1}, {}),
    (FORWARD_SM90, "rescale_threshold", (-0.5, 0.0, 15.0, 15.5), {0.0, 15.0}, {}),
    (FORWARD_SM90, "rescale_threshold", (0.0, 3.8, 4.0), {0.0, 3.8}, FP8),
    (FORWARD_SM90, "pack_gqa", (False, True), {False}, {"num_heads_q": 130}),
    (FORWARD_SM90, "pack_gqa", (False, True), {False, True}, {"num_heads_q": 128}),
    (FORWARD_SM90, "pack_gqa", (False, True), {False}, {"bias_dtype": torch.float16}),
    (FORWARD_SM90, "pv_columns", (0, 32, 64), {0}, {}),
    (FP8_SUMS, "pv_columns", range(0, 80, 16), {0, 32, 64}, {}),
    (FORWARD_SM90, "transposes_v", (False, True), {False, True}, FP8),
    (FORWARD_SM90, "transposes_v", (False, True), {False}, {}),
    (replace(FORWARD_SM90, cluster_size=2), "transposes_v", (False, True), {False}, FP8),
    (ONE_WARPGROUP, "blocks_per_sm", range(6), {1, 2, 3}, {}),
    (ONE_WARPGROUP, "blocks_per_sm", range(6), {1, 2}, {"head_dim": 128, "head_dim_v": 128}),
    (ONE_WARPGROUP, "blocks_per_sm", range(6), {1, 2}, {"head_dim_v": 128}),
    (replace(ONE_WARPGROUP, tile_n=48), "blocks_per_sm", range(6), {1}, {"head_dim_v": 256}),
    (replace(ONE_WARPGROUP, blocks_per_sm=3), "tile_n", range(64, 129, 16), {64, 80, 96}, {}),
    (FORWARD_SM90, "blocks_per_sm", (1, 2, 3), {1}, {}),
    (replace(ONE_WARPGROUP, transposes_v=True), "blocks_per_sm", (1, 2), {1}, FP8),
    (ONE_WARPGROUP, "blocks_per_sm", (1, 2), {1}, {"kv_dtype": torch.float8_e4m3fn}),
    (NO_PRODUCER, "blocks_per_sm", (1, 2), {1}, {}),
    (NO_PRODUCER, "overlap_tiles", (False, True), {False}, {}),
    (NO_PRODUCER, "dynamic_tiles", (False, True), {False}, {}),
    (NO_PRODUCER, "cluster_size", (1, 2), {1}, {}),
    (replace(NO_PRODUCER, overlap_gemm_softmax=False), "num_stages", range(4), {2, 3}, {}),
    (BackwardConfigSm90(), "tile_m", range(16, 260, 16), {64, 128}, {}),
    (BackwardConfigSm90(), "q_stages", range(5), {2, 3, 4}, {}),
    (BackwardConfigSm90(), "do_stages", range(5), {1, 2, 3, 4}, {}),
    (BackwardConfigSm90(), "by_gradient", (False, True), {True}, {"head_dim": 192}),
    (BackwardConfigSm90(), "by_gradient", (False, True), {False, True}, {"head_dim": 128, "head_dim_v": 128}),
    (BackwardConfigSm90(), "num_warpgroups", range(5), {1, 2}, {}),
    (BackwardConfigSm90(), "num_warpgroups", (1, 2), {2}, {"head_dim": 128, "head_dim_v": 128}),
    (BackwardConfigSm90(), "num_warpgroups", (1, 2), {2}, {"head_dim": 96, "head_dim_v": 96}),
    (BackwardConfigSm90(num_warpgroups=1), "tile_m", (64, 128), {64}, {}),
    (BackwardConfigSm90(by_gradient=True), "num_warpgroups", (1, 2), {2}, {}),
    (BY_QUERIES, "num_warpgroups", (1, 2), {2}, {}),
    (BY_QUERIES, "tile_m", (64, 128), {64}, {}),
    (BY_QUERIES, "q_stages", range(9), {4, 6, 8}, {}),
    (BY_QUERIES, "do_stages", range(9), {2, 4, 6, 8}, {}),
    (BY_QUERIES, "overlap_gradients", (False, True), {False}, {}),
    (BY_QUERIES, "by_gradient", (False, True), {False}, {}),
    (BY_QUERIES, "private_dq", (False, True), {False}, {}),
    (BackwardConfigSm90(q_stages=4), "by_queries", (False, True), {False}, {"deterministic": True}),
    (BackwardConfigSm90(by_gradient=True), "overlap_gradients", (False, True), {False}, {}),
    (BackwardConfigSm90(by_gradient=True), "private_dq", (False, True), {False}, {}),
    (BackwardConfigSm90(), "private_dq", (False, True), {False, True}, {}),
    (BackwardConfigSm90(), "private_dq", (False, True), {False}, {"has_alibi": True}),
    (BackwardConfigSm90(), "descending_turns", (False, True), {False, True}, {"deterministic": True}),
    (BackwardConfigSm90(), "descending_turns", (False, True), {False}, IN_TURNS),
    (BackwardConfigSm80(), "descending_turns", (False, True), {False}, IN_TURNS),
    (BackwardConfigSm90(), "heads_together", (False, True), {False, True}, {}),
    (BackwardConfigSm90(), "heads_together", (False, True), {False}, {"deterministic": True}),
    (BackwardConfigSm90(), "heads_together", (False, True), {False}, {"is_packed": True}),
    (BackwardConfigSm90(heads_together=True), "private_dq", (False, True), {False}, {}),
)


def accepts(config, problem, arch):
    try:
        config.check(problem, arch)
    except UnsupportedError:
        return False
    return True


@pytest.mark.parametrize(("config", "field", "values", "accepted", "changes"), CASES)
def test_values_that_are_accepted(config, field, values, accepted, changes):
    is_hopper = isinstance(config, (ForwardConfigSm90, BackwardConfigSm90))
    problem, arch = replace(PROBLEM, **changes), "sm_90a" if is_hopper else "sm_80"
    assert {value for value in values if accepts(replace(config, **{field: value}), problem, arch)} == accepted


@pytest.mark.parametrize(
    ("config", "refusing"),
    [
        (DecodeConfigSm80(early_merge=True), ("sm_80", "sm_86", "sm_89")),
        (BackwardConfigSm80(vector_adds=True), ("sm_80", "sm_86", "sm_89")),
        (FORWARD_SM90, ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")),
        (BackwardConfigSm90(), ("sm_80", "sm_86", "sm_89", "sm_100a", "sm_120a")),
    ],
)
def test_architectures_that_are_refused(config, refusing):
    archs = "sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a"
    problem = replace(PROBLEM, head_dim=32, head_dim_v=32)
    assert tuple(arch for arch in archs if not accepts(config, problem, arch)) == refusing


@pytest.mark.parametrize(
    ("blocks", "num_warpgroups", "registers"),
    [(1, *row) for table in (REGISTERS, REGISTERS_OF_PAGES) for row in table.items()]
    + [(blocks, 1, registers) for blocks, registers in REGISTERS_OF_SEVERAL.items()],
)
def test_no_thread_asks_for_registers_that_a_launch_does_not_give(blocks, num_warpgroups, registers):
    """A launch gives every thread the same multiple of 8, up to 255; a request for more than are free never ends."""
    producer, consumer = registers
    given = min(65536 // (128 * (num_warpgroups + 1) * blocks), 255) // 8 * 8
    assert producer + num_warpgroups * consumer <= (num_warpgroups + 1) * given
