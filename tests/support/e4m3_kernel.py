"""A kernel that applies the functions of kernels/device/blocks/memory/e4m3.py to each word, for their tests."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from onepass.kernels.device.blocks.memory import e4m3


class Convert:
    @cute.jit
    def __call__(
        self, words: cute.Tensor, floats: cute.Tensor, halves: cute.Tensor, results: cute.Tensor, stream: cuda.CUstream
    ):
        self.kernel(words, floats, halves, results).launch(grid=[words.shape[0] // 32, 1, 1], block=[32, 1, 1])

    @cute.kernel
    def kernel(self, words: cute.Tensor, floats: cute.Tensor, halves: cute.Tensor, results: cute.Tensor):
        """words (n,) of four e4m3; floats (n, 2); halves (n, 4) pairs of fp16; results (n, 4) float32, (n,) e4m3."""
        i = cute.arch.block_idx()[0] * 32 + cute.arch.thread_idx()[0]
        word = words[i]
        neighbors, parity = e4m3.neighbors_as_fp16(word), e4m3.evens_and_odds_as_fp16(word)
        for j in cutlass.range_constexpr(2):
            halves[i, j], halves[i, 2 + j] = neighbors[j], parity[j]
        pair = e4m3.pair_as_floats(word)
        factors = e4m3.factors_of_row(floats[i, 0])
        for j in cutlass.range_constexpr(2):
            results[i, j], results[i, 2 + j] = pair[j], factors[j]
        halves[i, 4] = Int32(e4m3.pack_two(floats[i, 0], floats[i, 1])) & 0xFFFF


def trace():
    from cutlass.cute.runtime import make_fake_stream

    from onepass.kernels.launch.arguments import fake_tensor

    arguments = (
        fake_tensor(Int32, None, align_bytes=4),
        fake_tensor(Float32, None, 2, align_bytes=4),
        fake_tensor(Int32, None, 5, align_bytes=4),
        fake_tensor(Float32, None, 4, align_bytes=4),
        make_fake_stream(use_tvm_ffi_env_stream=True),
    )
    return Convert(), arguments
