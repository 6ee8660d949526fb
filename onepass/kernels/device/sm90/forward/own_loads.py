"""The loads of a consumer of the Hopper forward without warp specialization: its first warp issues them."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32

from ...blocks.memory.untraced import Untraced
from .producer import Producer, as_producer
from .tile import Tile, after


class OwnLoads(Untraced):
    """Loads of what the next step needs, issued in each step. Args: producer: None: another warp issues all loads."""

    def __init__(self, producer: Producer | None):
        self.producer = producer

    @cute.jit
    def begin(self, tile: Tile, wave: Int32, k_state, v_state):
        """The loads that a tile starts with: Q, the first V, and two blocks of K, the second one for the first step."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                self.producer.load_q(tile, wave)
                self._load_k(tile, tile.last - 1, k_state)
                self._load_v(tile, tile.last - 1, v_state)
                if tile.last - 1 > tile.first:
                    self._load_k(tile, tile.last - 2, after(k_state))

    @cute.jit
    def load_next(self, tile: Tile, n_block: Int32, k_state, v_state):
        """The loads in the step of K_n and V_(n+1), while its GEMMs run: V_n and K_(n-1)."""
        if cutlass.const_expr(self.producer is not None):
            if cute.arch.make_warp_uniform(cute.arch.warp_idx()) == 0:
                if n_block > tile.first:
                    self._load_k(tile, n_block - 1, after(k_state))
                self._load_v(tile, n_block, after(v_state))

    def _load_k(self, tile: Tile, n_block: Int32, state):
        block = self.producer.key_block(tile, n_block)
        self.producer.load_k(self.producer.head_kv(tile), tile.origin_k, block, as_producer(state))

    def _load_v(self, tile: Tile, n_block: Int32, state):
        block = self.producer.key_block(tile, n_block)
        self.producer.load_v(self.producer.head_kv(tile), self.producer.origin_v(tile), block, as_producer(state))
