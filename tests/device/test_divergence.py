"""Where warps of a warpgroup may part (support/divergence.py), in PTX written for it.

`machine_code.read` asks the same of each kernel that a test compiles.
"""

import divergence
import pytest

KERNEL = """.visible .entry kernel(
.param .u32 kernel_param_0
)
.reqntid 384, 1, 1
{{
ld.param.b32 %n, [kernel_param_0];
mov.u32 %thread, %tid.x;
mov.u32 %lane, %laneid;
shr.u32 %w, %thread, 5;
shfl.sync.idx.b32 %warp, %w, 0, 31, -1;
{}
ret;
}}
"""
WAIT = "wgmma.wait_group.sync.aligned 0"


def branch(condition):
    return f"{condition}\n@%p bra $after;\n{WAIT};\n$after:"


TOGETHER = {
    "an argument": branch("setp.eq.s32 %p, %n, 3;"),
    "the number of the thread block": branch("mov.u32 %c, %ctaid.x;\nsetp.eq.s32 %p, %c, %n;"),
    "the number of the warpgroup": branch("setp.lt.s32 %p, %warp, 4;"),
    "the same from its threads": branch("shr.u32 %wg, %thread, 7;\nadd.s32 %m, %wg, %n;\nsetp.ne.b32 %p, %m, 1;"),
    "a word in shared memory": branch("ld.shared.b32 %m, [%n+8];\nsetp.ne.b32 %p, %m, 1;"),
    "a maximum over lanes": branch(
        "shl.b32 %a, %lane, 2;\nld.global.b32 %m, [%a];\nredux.sync.max.s32 %x, %m, -1;\nsetp.ne.b32 %p, %x, 1;"
    ),
    "after the warps have met again": (
        f"elect.sync %r|%p, -1;\n@%p bra $after;\nst.shared.b32 [%n], 1;\n$after:\n{WAIT};"
    ),
    "a loop of as many rounds": (
        f"mov.b32 %i, 0;\n$top:\n{WAIT};\nadd.s32 %i, %i, 1;\nsetp.lt.s32 %p, %i, %n;\n@%p bra $top;"
    ),
    "a scope of inline assembly": (
        "{ .reg .b32 t; mbarrier.arrive.expect_tx.shared::cluster.b64 _, [t], 4;"
        f" st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [t], %n, [t]; }}\n{WAIT};"
    ),
    "a wait for a barrier": f"$top:\nmbarrier.try_wait.parity.shared.b64 %p, [%n], 0;\n@!%p bra $top;\n{WAIT};",
}
PARTED = {
    "a vote": branch("setp.lt.f32 %q, %x, %y;\nvote.sync.any.pred %p, %q, -1;\nnot.pred %p, %p;"),
    "an elected lane": branch("elect.sync %r|%p, -1;"),
    "the number of the warp": branch("setp.ne.b32 %p, %warp, 1;"),
    "the lane": branch("setp.ne.b32 %p, %lane, 0;"),
    "a word of a thread": branch("ld.shared.b32 %m, [%thread];\nsetp.ne.b32 %p, %m, 1;"),
    "a test of a barrier": branch("mbarrier.test_wait.parity.shared.b64 %p, [%n], 0;"),
    "a guard": f"elect.sync %r|%p, -1;\n@%p {WAIT};",
    "a value from a branch of a warp": branch(
        "mov.b32 %m, 0;\nelect.sync %r|%q, -1;\n@%q bra $met;\nmov.b32 %m, 1;\n$met:\nsetp.ne.b32 %p, %m, 1;"
    ),
    "rounds that a warp counts": branch(
        "mov.b32 %i, 0;\n$top:\nadd.s32 %i, %i, 1;\nmbarrier.test_wait.parity.shared.b64 %q, [%n], 0;\n@!%q bra $top;\n"
        "setp.ne.b32 %p, %i, 1;"
    ),
    "an end for one warp": f"setp.ne.b32 %p, %warp, 1;\n@%p exit;\n{WAIT};",
}
# scores: what GEMMs have left in registers
SCORES = "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%x, %y}, %n, %n, 1, 1, 1, 0, 0;\n"


@pytest.mark.parametrize("name", TOGETHER)
def test_a_warpgroup_stays_together(name):
    assert divergence.parted(KERNEL.format(SCORES + TOGETHER[name])) == []


@pytest.mark.parametrize("name", PARTED)
def test_warps_part(name):
    (found,) = divergence.parted(KERNEL.format(SCORES + PARTED[name]))
    assert found.endswith(WAIT)
