"""Single instructions that the kernel language does not offer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Uint32, Uint64


def emit(instructions: str, reads: list, writes: Sequence[type] = ()):
    """PTX instructions, in which {$r0}, .. are the values that they read.

    Returns: the values of the types `writes`, which are {$w0}, ..: a tuple where there are several.
    """
    return cute.arch.inline_ptx(instructions, write_only_types=list(writes), read_only_args=reads)


@cute.jit
def pack_pair(low: Float32, high: Float32, dtype: cutlass.Constexpr) -> Int32:
    """Two floats rounded to nearest into one 32-bit register of two bf16 or fp16."""
    name = "bf16" if cutlass.const_expr(dtype is cutlass.BFloat16) else "f16"
    return emit(f"cvt.rn.{name}x2.f32 {{$w0}}, {{$r1}}, {{$r0}};", [low, high], [Int32])


@cute.jit
def unpack_pair(word: Int32, dtype: cutlass.Constexpr) -> tuple:
    """The two floats of a 32-bit register of two bf16 or fp16."""
    if cutlass.const_expr(dtype is cutlass.BFloat16):
        instructions = "shl.b32 {$w0}, {$r0}, 16; and.b32 {$w1}, {$r0}, 0xffff0000;"
    else:
        instructions = (
            "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; cvt.f32.f16 {$w1}, high; }"
        )
    return emit(instructions, [word], [Float32, Float32])


@cute.jit
def add_to_global(target: cute.Pointer, values: list):
    """target[0:4] += values, 16 bytes at once, without waiting for a result. Needs Hopper or newer."""
    emit("red.global.add.v4.f32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", [target.toint(), *values])


@cute.jit
def add_one_to_global(target: cute.Pointer, value: Float32):
    """`add_to_global` of one value, which GPUs before Hopper can do as well."""
    emit("red.global.add.f32 [{$r0}], {$r1};", [target.toint(), value])


def load_past_l1(source: cute.Pointer) -> tuple:
    """The four float32 at source, read as 16 bytes from L2, where additions have left them."""
    return emit(
        "ld.relaxed.gpu.global.v4.f32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];", [source.toint()], [Float32] * 4
    )


def look_at(flag: cute.Pointer) -> Int32:
    """The current value of an int32 in global memory; what it says about other memory holds after a
    `fence_acq_rel_gpu`."""
    return emit("ld.relaxed.gpu.global.b32 {$w0}, [{$r0}];", [flag.toint()], [Int32])


def is_phase_over(barrier: cute.Pointer, parity: Int32) -> Int32:
    """Whether the phase of this parity of an mbarrier is complete, without waiting for it: 1 or 0."""
    return emit(
        "{ .reg .pred over; mbarrier.test_wait.parity.shared::cta.b64 over, [{$r0}], {$r1};"
        " selp.b32 {$w0}, 1, 0, over; }",
        [Int32(barrier.toint()), parity],
        [Int32],
    )


@cute.jit
def wait_until_equal(flag: cute.Pointer, value: Int32, seen: Int32):
    """Wait until an int32 in global memory is `value`. For a whole warp.

    All lanes read and vote: around a loop that lanes might leave one by one, ptxas keeps nothing in uniform registers.

    Args: seen: what the int32 was when the lanes looked at it before.
    """
    emit(
        "{ .reg .pred differs; .reg .b32 seen; mov.b32 seen, {$r2}; bra.uni check;"
        " again: ld.acquire.gpu.global.b32 seen, [{$r0}];"
        " check: setp.ne.s32 differs, seen, {$r1}; vote.sync.any.pred differs, differs, 0xffffffff;"
        " @differs bra again; }",
        [flag.toint(), value, seen],
    )


@cute.jit
def copy_bulk(target: Int32, source: cute.Pointer, num_bytes: Int32 | int, barrier: cute.Pointer):
    """Copy bytes from global memory to the address `target` in shared memory; `barrier` counts them when they arrive.

    16 divides the addresses and the number.
    """
    emit(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        [target, source.toint(), Int32(num_bytes), Int32(barrier.toint())],
    )


# Arrivals at other thread blocks have the default semantics, as in CUTLASS: with .release.cluster each would wait for
# all memory operations of the thread, among them additions to dQ (MEMBAR.ALL.GPU).


@cute.jit
def arrive_at(barrier: cute.Pointer, rank: Int32 | int):
    """One arrival at the barrier that lies at this address in a thread block of the cluster."""
    emit(
        "{ .reg .b32 b; mapa.shared::cluster.u32 b, {$r0}, {$r1}; mbarrier.arrive.shared::cluster.b64 _, [b]; }",
        [Int32(barrier.toint()), Int32(rank)],
    )


@cute.jit
def arrive_at_first(barrier: cute.Pointer, count: cutlass.Constexpr[int], lane: Int32):
    """One arrival at the barrier of each of the first `count` thread blocks of the cluster. For a whole warp."""
    emit(
        f"{{ .reg .b32 b; .reg .pred p; setp.lt.s32 p, {{$r1}}, {count};"
        " @p mapa.shared::cluster.u32 b, {$r0}, {$r1}; @p mbarrier.arrive.shared::cluster.b64 _, [b]; }",
        [Int32(barrier.toint()), lane],
    )


@cute.jit
def copy_to_peer(target: Int32, source: Int32, num_bytes: Int32 | int, barrier: cute.Pointer, rank: Int32):
    """Copy bytes of shared memory to another thread block of the cluster, whose `barrier` counts them there.

    Args:
        target, barrier: addresses in this thread block of what lies in the other one.
        rank: the other one's in the cluster.
    """
    emit(
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, {$r0}, {$r4}; mapa.shared::cluster.u32 b, {$r3}, {$r4};"
        " cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [t], [{$r1}], {$r2}, [b]; }",
        [target, source, Int32(num_bytes), Int32(barrier.toint()), rank],
    )


@cute.jit
def send_word(target: cute.Pointer, value: Int32, barrier: cute.Pointer, rank: Int32 | int):
    """Store an int32 in the shared memory of a thread block of the cluster, and complete a phase of its barrier.

    Args: target, barrier: where these lie in that thread block. The barrier has one arrival, which is this one.
    """
    emit(
        "{ .reg .b32 t, b; mapa.shared::cluster.u32 t, {$r0}, {$r3}; mapa.shared::cluster.u32 b, {$r2}, {$r3};"
        " mbarrier.arrive.expect_tx.shared::cluster.b64 _, [b], 4;"
        " st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [t], {$r1}, [b]; }",
        [Int32(target.toint()), value, Int32(barrier.toint()), Int32(rank)],
    )


def wait_while_zero(flag: cute.Pointer) -> Int32:
    """Wait until an int32 in global memory is not 0. For a whole warp. Returns: its value."""
    return emit(
        "{ .reg .pred zero; again: ld.acquire.gpu.global.b32 {$w0}, [{$r0}];"
        " setp.eq.s32 zero, {$w0}, 0; vote.sync.any.pred zero, zero, 0xffffffff;"
        " @!zero bra done; nanosleep.u32 200; bra again; done: }",
        [flag.toint()],
        [Int32],
    )


def publish(target: cute.Pointer, value: Int32):
    """target[0] = value in global memory; who sees it sees what this thread has done and seen so far."""
    emit("st.release.gpu.global.b32 [{$r0}], {$r1};", [target.toint(), value])


def draw(counter: cute.Pointer) -> Int32:
    """Add one to an int32 in global memory. Returns: its value before."""
    return emit("atom.relaxed.gpu.global.add.s32 {$w0}, [{$r0}], 1;", [counter.toint()], [Int32])


@cute.jit
def increment(flag: cute.Pointer):
    """flag += 1 in global memory. With a `fence_acq_rel_gpu` before it, others see what this thread has done so far."""
    emit("red.relaxed.gpu.global.add.s32 [{$r0}], 1;", [flag.toint()])


def load_transposed(address: Int32) -> tuple:
    """Four 8 x 8 matrices of 16-bit values from shared memory, transposed (ldmatrix).

    Lane 8 m + i names row i of matrix m; lane 4 c + q gets column c of rows 2q and 2q + 1 of each matrix.
    """
    return emit(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];",
        [address],
        [Int32] * 4,
    )


def store_matrices(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32):
    """Store four 8 x 8 matrices of 16-bit values (stmatrix).

    Lane 8 m + i names row i of matrix m; lanes 4 i to 4 i + 3 have the words of that row.
    """
    emit("stmatrix.sync.aligned.m8n8.x4.shared.b16 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", [address, a, b, c, d])


def load_words(address: Int32) -> tuple:
    """Four words from shared memory, from an address that 16 divides."""
    return emit("ld.shared.v4.b32 { {$w0}, {$w1}, {$w2}, {$w3} }, [{$r0}];", [address], [Int32] * 4)


def store_words(address: Int32, a: Int32, b: Int32, c: Int32, d: Int32):
    """Store four words to shared memory, at an address that 16 divides."""
    emit("st.shared.v4.b32 [{$r0}], { {$r1}, {$r2}, {$r3}, {$r4} };", [address, a, b, c, d])


def permute_bytes(a: Int32, b: Int32, selector: Int32) -> Int32:
    """Four of the bytes of a (0 to 3) and b (4 to 7), chosen by the lowest four 4-bit digits of the selector."""
    return emit("prmt.b32 {$w0}, {$r0}, {$r1}, {$r2};", [a, b, selector], [Int32])


def ones(first: Int32, count: Int32) -> Uint32:
    """A word with `count` ones from bit `first` on. Args: first, count: not below 0; more than 32 counts as 32."""
    return Uint32(emit("bmsk.clamp.b32 {$w0}, {$r0}, {$r1};", [first, count], [Int32]))


def logical(a: Int32, b: Int32, c: Int32, table: int) -> Int32:
    """A logical function of the bits of three words. Args: table: its value for 0xF0, 0xCC and 0xAA."""
    return emit(f"lop3.b32 {{$w0}}, {{$r0}}, {{$r1}}, {{$r2}}, {table};", [a, b, c], [Int32])


def replicate_signs(word: Int32, first: int, second: int) -> Int32:
    """A mask of two halves: all bits of one are the highest bit of the word's byte `first`, of the other `second`."""
    selector = 0x88 | first << 4 | first | (0x88 | second << 4 | second) << 8
    return permute_bytes(word, word, Int32(selector))


@cute.jit
def pack(source: cute.Tensor, target: cute.Tensor):
    """A float32 fragment -> a 16-bit fragment of the same order.

    The assembly is volatile, so it stays after the wait that frees `target`. An ordinary conversion is pure arithmetic:
    it would be hoisted above the wait, two copies of P would be alive, and ptxas would serialize every wgmma.
    """
    words = cute.recast_tensor(target, Int32)
    for i in cutlass.range_constexpr(cute.size(words)):
        words[i] = pack_pair(source[2 * i], source[2 * i + 1], target.element_type)


@cute.jit
def pack_halves(source: cute.Tensor, high: cute.Tensor, low: cute.Tensor):
    """A float32 fragment -> its rounding to 16 bits (high), and the rest in 16 bits (low); see `pack`."""
    high_words, low_words = (cute.recast_tensor(t, Int32) for t in (high, low))
    for i in cutlass.range_constexpr(cute.size(high_words)):
        a, b = source[2 * i], source[2 * i + 1]
        word = pack_pair(a, b, high.element_type)
        rounded_a, rounded_b = unpack_pair(word, high.element_type)
        high_words[i] = word
        low_words[i] = pack_pair(a - rounded_a, b - rounded_b, low.element_type)


@cute.jit
def pack_four(a: Float32, b: Float32, c: Float32, d: Float32) -> Int32:
    """Four floats rounded to e4m3 in one 32-bit register, a in its lowest byte.

    Magnitudes above 448 become 448; NaN stays NaN.
    """
    return emit(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, {$r1}, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f32 high, {$r3}, {$r2}; mov.b32 {$w0}, {low, high}; }",
        [a, b, c, d],
        [Int32],
    )


@cute.jit
def pack_two_pairs(ab: Int32, cd: Int32) -> Int32:
    """Two pairs of float16 rounded to e4m3 in one 32-bit register, the first one in its lower half; see `pack_four`."""
    return emit(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f16x2 low, {$r0};"
        " cvt.rn.satfinite.e4m3x2.f16x2 high, {$r1}; mov.b32 {$w0}, {low, high}; }",
        [ab, cd],
        [Int32],
    )


def round_to_integers(a: Float32, b: Float32) -> Int32:
    """round(a 2^24) and round(b 2^24) as 16-bit integers, a's in the lower half; below 0 they are 0.

    Up to 2048 that is what the bits of a float16 are. Above, they only order like the numbers. NaN becomes 0x7fff.
    """
    return emit("cvt.rn.relu.f16x2.f32 {$w0}, {$r1}, {$r0};", [a, b], [Int32])


def shift_left(x: Int32, bits: int) -> Int32:
    return emit(f"shl.b32 {{$w0}}, {{$r0}}, {bits};", [x], [Int32])


def add_pairs(a: Int32, b: Int32) -> Int32:
    """The sums of two pairs of float16."""
    return emit("add.rn.f16x2 {$w0}, {$r0}, {$r1};", [a, b], [Int32])


def sum_of_pair(a: Int32) -> Float32:
    low, high = unpack_pair(a, cutlass.Float16)
    return low + high


@cute.jit
def transpose_bytes(a: Int32, b: Int32, c: Int32, d: Int32) -> tuple:
    """Transpose 4 x 4 bytes: register i of the result has byte i of a, b, c, d, from its lowest byte on."""
    return emit(
        "{ .reg .b32 ab, cd, AB, CD; prmt.b32 ab, {$r0}, {$r1}, 0x5140; prmt.b32 cd, {$r2}, {$r3}, 0x5140;"
        " prmt.b32 AB, {$r0}, {$r1}, 0x7362; prmt.b32 CD, {$r2}, {$r3}, 0x7362;"
        " prmt.b32 {$w0}, ab, cd, 0x5410; prmt.b32 {$w1}, ab, cd, 0x7632;"
        " prmt.b32 {$w2}, AB, CD, 0x5410; prmt.b32 {$w3}, AB, CD, 0x7632; }",
        [a, b, c, d],
        [Int32] * 4,
    )


@cute.jit
def multiply_16x16(a: list, low: Int32, high: Int32, dtype: cutlass.Constexpr) -> tuple:
    """mma m16n8k16 of bf16 or fp16 that starts from 0: four registers of A (16, 16), two of B (16, 8) -> four sums."""
    name = "bf16" if cutlass.const_expr(dtype is cutlass.BFloat16) else "f16"
    return emit(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{name}.{name}.f32 {{ {{$w0}}, {{$w1}}, {{$w2}}, {{$w3}} }},"
        " { {$r0}, {$r1}, {$r2}, {$r3} }, { {$r4}, {$r5} }, { {$r6}, {$r6}, {$r6}, {$r6} };",
        [*a, low, high, Float32(0.0)],
        [Float32] * 4,
    )


@cute.jit
def quotient(a: Float32, b: Float32) -> Float32:
    """a / b, rounded to nearest."""
    return emit("div.rn.f32 {$w0}, {$r0}, {$r1};", [a, b], [Float32])


@cute.jit
def order_after_words(words: cute.Tensor):
    """Keep what follows in the program after these words, each of them one 32-bit or two 16-bit values >= 0.

    Pure arithmetic has no order with respect to waits. An instruction with a side effect has; the one here is never
    executed, and its predicate depends on all words. A NaN from an exponential has no sign either (0x7fff...).
    """
    either = words[0]
    for i in cutlass.range_constexpr(1, cute.size(words)):
        either = either | words[i]
    emit("{ .reg .pred p; setp.lt.s32 p, {$r0}, 0; @p st.volatile.shared.b32 [{$r0}], {$r0}; }", [either])


def add_here(a: Float32, b: Float32) -> Float32:
    """a + b, computed before any instruction with a side effect that follows in the program."""
    return emit("add.f32 {$w0}, {$r0}, {$r1};", [a, b], [Float32])


@cute.jit
def exit_if(condition: Boolean):
    """End this thread. Only for whole thread blocks, and before anything waits for them."""
    cute.arch.inline_ptx("exit;", predicate=condition)


def copy_of(x: Int32 | Int64) -> Int32 | Int64:
    """x, from which the compiler computes anew what it would otherwise compute once, and keep in registers."""
    move = f"mov.b{type(x).width} {{$w0}}, {{$r0}};"
    return emit(move, [x], [type(x)])


def bits(x: Float32) -> Int32:
    """The bits of a float32 as an integer."""
    return emit("mov.b32 {$w0}, {$r0};", [x], [Int32])


@cute.jit
def power_below(x: Float32) -> tuple:
    """n and 2^-n with 2^n <= x < 2^(n + 1), for a number x above 0 that is not subnormal; n is a float.

    For 0 they are -127 and 2^127. For NaN they are arbitrary: a product with NaN is NaN anyway.
    """
    exponent = bits(x) >> 23
    return (exponent - 127).to(Float32), (254 - exponent << 23).bitcast(Float32)


@cute.jit
def transpose_in_quad(r0: Int32, r1: Int32, r2: Int32, r3: Int32, lane_in_quad: Int32):
    """Transpose 4 x 4 registers over the four lanes of a quad: lane i gets register i of lanes 0, 1, 2, 3 in order.

    Two rounds of exchange, with the lane two away and then one away: 4 shuffles and 8 selects.
    """
    is_upper, is_odd = (lane_in_quad & 2) != 0, (lane_in_quad & 1) != 0
    swap0 = cute.arch.shuffle_sync_bfly(r0 if is_upper else r2, offset=2)
    swap1 = cute.arch.shuffle_sync_bfly(r1 if is_upper else r3, offset=2)
    a0, a1 = swap0 if is_upper else r0, swap1 if is_upper else r1
    a2, a3 = r2 if is_upper else swap0, r3 if is_upper else swap1
    swap0 = cute.arch.shuffle_sync_bfly(a0 if is_odd else a1, offset=1)
    swap1 = cute.arch.shuffle_sync_bfly(a2 if is_odd else a3, offset=1)
    return (
        swap0 if is_odd else a0,
        a1 if is_odd else swap0,
        swap1 if is_odd else a2,
        a3 if is_odd else swap1,
    )


PHILOX_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
PHILOX_WEYL = 0x9E3779B9, 0xBB67AE85


PHILOX_ROUNDS = 10


def philox(counter: tuple, keys: Iterable[tuple]) -> tuple:
    """Philox 4x32-10 as in geometry/philox.py: four words of random bits from four words and `philox_keys`."""
    c0, c1, c2, c3 = counter
    for k0, k1 in keys:
        low0, high0 = _multiply_wide(c0, PHILOX_MULTIPLIERS[0])
        low1, high1 = _multiply_wide(c2, PHILOX_MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
    return c0, c1, c2, c3


def philox_keys(key: Iterable) -> Iterator[tuple]:
    """The two words of each round, from a key of two words."""
    k0, k1 = key
    for _ in range(PHILOX_ROUNDS):
        yield k0, k1
        k0, k1 = (_add_word(k, word) for k, word in zip((k0, k1), PHILOX_WEYL, strict=True))


def _multiply_wide(a: Int32, b: int) -> tuple:
    """The low and the high word of the product of two unsigned words."""
    # arithmetic without assembly, so that what does not change from block to block is computed once
    product = Uint64(Uint32(a)) * Uint64(b)
    return product.to(Int32), (product >> 32).to(Int32)


def _add_word(a: Int32, b: int) -> Int32:
    """a + b modulo 2^32."""
    return a + Int32(b - 2**32 if b >= 2**31 else b)
