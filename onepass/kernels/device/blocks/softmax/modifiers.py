"""What a call does to pairs of a query and a key besides scale, softcap and window, on accumulators in registers.

    intervals     which keys a query sees: a range, left padding, a window around a position that a tensor gives
    terms         what is added to scores after the softcap: ALiBi and a bias
    dropout       which probabilities are left out of the product with V

A block of scores is (2, columns) values of a thread, like in mask.py: in a forward the thread's two rows are queries
and the columns keys, in a backward rows are keys and columns queries (`Block.has_keys_in_rows`).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32, Uint64

from .....geometry.block_range import KeyBlocks
from .....geometry.integers import ceil_div, maximum, minimum, select
from .....geometry.tile_scheduler import LANES
from .....problem.attention import FULL, WORD
from ....arguments import ModifierTensors
from ..memory.layouts import column_offset
from ..memory.ptx import add_one_to_global, ones, philox, philox_keys
from ..memory.untraced import Untraced
from .dropout import KeptPairs, bit, group_of

ROWS = 16  # of a warp in a block of scores, 8 apart those of a thread


class Place(NamedTuple):
    """The head and the sequence that a block of scores belongs to.

    Attributes:
        first_row, first_key, row_entry: where the sequence's queries, and its keys, begin in tensors of rows.
        entry: the batch entry, or the number of the packed sequence; of rows that belong to none, one more.
    """

    head: Int32
    first_row: Int32
    first_key: Int32
    row_entry: Int32
    entry: Int32
    seqlen_q: Int32
    seqlen_k: Int32


def place_of(head, origin_q, origin_k, sequence, geometry, is_packed: bool) -> Place:
    """The place of a tile. Args: origin_q, origin_k: batch entry, or the first row of a packed sequence."""
    rows = (origin_q, origin_k, Int32(0), sequence) if is_packed else (Int32(0), Int32(0), origin_q, origin_q)
    return Place(head, *rows, geometry.seqlen_q, geometry.seqlen_k)


class Block(NamedTuple):
    """Where a thread's scores lie.

    Attributes:
        rows: the numbers of its two rows, 8 apart: queries, or keys with has_keys_in_rows.
        first_column: the number of its first column: 2 * (lane % 4) more than that of the block.
        places: the place of each row. They differ in their head where the query heads of a kv head share a tile.
        slope: that of ALiBi for both rows, where a kernel has read it; None: it is read now.
        intervals: the keys [low, high) that each row sees, where a kernel has read them; None: they are read now.
    """

    rows: list
    first_column: Int32
    places: list
    has_keys_in_rows: bool = False
    slope: Float32 | None = None
    intervals: list[tuple] | None = None


def bit_of(word: Uint32, number) -> Int32:
    """The bit of this number in a word: 0 or 1."""
    return Int32(word >> Uint32(number) & Uint32(1))


def offsets(interval: tuple, origin) -> list:
    """An interval of numbers counted from an origin; a bound below 0, whose difference may not have 32 bits, is 0."""
    return [maximum(n, 0) - origin for n in interval]


def columns_before(offset) -> Int32:
    """How many columns of a thread lie before this offset from its first one; it may be more than there are."""
    offset = maximum(offset, 0)
    return (offset >> 3) * 2 + minimum(offset & 7, 2)


def bits_between(first, end) -> Uint32:
    """A word whose bits [first, end) are ones; neither is below 0."""
    return ones(first, maximum(end - first, 0))


class Modifiers(Untraced):
    """The modifiers of a kernel's calls.

    Args:
        window: its left and right side; None: unbounded.
        is_deterministic: dbias has an element for each pair of a query and a key, so that no two are added together.
        block_size: queries and keys of a block of kinds, if there are any.
    """

    def __init__(
        self,
        tensors: ModifierTensors,
        window: tuple,
        is_deterministic: bool = False,
        block_size: tuple[int, int] | None = None,
    ):
        self.tensors, self.window, self.block_size = tensors, window, block_size
        self.is_deterministic = is_deterministic
        # read before the main loop: the compiler moves no load over its barriers, and each block would wait for it
        self.random_key = self._random_key() if self.drops else None

    @property
    def has_intervals(self) -> bool:
        """Whether the keys that a query sees follow from tensors."""
        return self.has_lists or not (self.tensors.ranges is self.tensors.positions is self.tensors.starts is None)

    @property
    def has_lists(self) -> bool:
        """Whether a tile's blocks come from a list."""
        return self.tensors.numbers is not None

    @property
    def hides_by_key(self) -> bool:
        """Whether a pair may be hidden although the key is in the query's interval."""
        return self.tensors.query_ranges is not None or self.tensors.kinds is not None

    @property
    def hides_by_query(self) -> bool:
        """Whether a pair may be hidden for other reasons than `query_ranges`.

        These hide queries and keys past the last ones as well (`seen_queries`).
        """
        others = *self.tensors[:3], self.tensors.kinds, *self.window
        return self.tensors.query_ranges is None or any(x is not None for x in others)

    @property
    def adds_terms(self) -> bool:
        return self.tensors.slopes is not None or self.tensors.bias is not None

    @property
    def drops(self) -> bool:
        return self.tensors.dropout_state is not None

    # ---------------------------------------------------------------- rows

    def _row(self, place: Place, query) -> Int32:
        """The row of a query in tensors; of a query past the last one, the last row."""
        return place.first_row + maximum(minimum(query, place.seqlen_q - 1), 0)

    def position(self, place: Place, query) -> Int32:
        """Where a query stands among its keys."""
        if self.tensors.positions is None:
            return query + place.seqlen_k - place.seqlen_q
        return self.tensors.positions[self._row(place, query), place.row_entry]

    def number(self, place: Place, query) -> Int32:
        """The number that chooses a query's row of the bias and its random bits."""
        return query if self.tensors.positions is None else self.position(place, query)

    def interval(self, place: Place, query) -> tuple:
        """The keys [low, high) that a query sees; a query that does not exist sees none."""
        row, (ranges, _, starts, *_) = self._row(place, query), self.tensors
        left, right = self.window
        low, high = Int32(0), place.seqlen_k
        if ranges is not None:
            low = maximum(low, ranges[row, 0, place.head, place.row_entry])
            high = minimum(high, ranges[row, 1, place.head, place.row_entry])
        position = self.position(place, query)
        if left is not None:
            low = maximum(low, position - left)
        if right is not None:
            high = minimum(high, position + right + 1)
        if starts is not None:
            start = starts[minimum(place.entry, cute.size(starts) - 1)]
            low = maximum(low, start)
            high = select(position >= start, high, low)
        return low, select(query < place.seqlen_q, high, low)

    # ---------------------------------------------------------------- intervals

    def key_blocks(self, rows: list[tuple], seqlen_k, tile_n: int) -> KeyBlocks:
        """`block_range.key_blocks` of a tile's queries; for all lanes of a warp.

        Args: rows: the places and the numbers of this lane's queries, which need not exist.
        """
        first, clear_first, clear_last, last = seqlen_k, Int32(0), seqlen_k, Int32(0)
        for place, query in rows:
            low, high = self.interval(place, query)
            # the block of a query that sees nothing is not clear, and begins nowhere
            is_empty = low >= high
            low, high = select(is_empty, seqlen_k, low), select(is_empty, Int32(0), high)
            # one past the last query says nothing of the others
            exists = query < place.seqlen_q
            first, last = minimum(first, low), maximum(last, high)
            clear_first = maximum(clear_first, select(exists, low, Int32(0)))
            clear_last = minimum(clear_last, select(exists, high, seqlen_k))
        low, clear_low, clear_high, high = (
            cute.arch.make_warp_uniform(cute.arch.warp_redux_sync(value, kind))
            for value, kind in ((first, "min"), (clear_first, "max"), (clear_last, "min"), (last, "max"))
        )
        first = minimum(low, maximum(seqlen_k - 1, 0)) // tile_n
        last = maximum(ceil_div(high, tile_n), first + 1)
        clear_last = maximum(minimum(clear_high // tile_n, last), first)
        clear_first = maximum(minimum(ceil_div(clear_low, tile_n), clear_last), first)
        return KeyBlocks(first, clear_first, clear_last, last)

    def queries_of_key(self, place: Place, key) -> tuple:
        """The queries [low, high) of `query_ranges` that see a key; past the last key, those of the last one."""
        ranges = self.tensors.query_ranges
        row = minimum(place.first_key + maximum(minimum(key, place.seqlen_k - 1), 0), ranges.shape[0] - 1)
        return tuple(ranges[row, i, place.head, place.row_entry] for i in range(2))

    def seen_queries(self, place: Place, key) -> tuple:
        """The queries [low, high) of the sequence that see a key; no query sees a key past the last one."""
        low, high = self.queries_of_key(place, key)
        return low, select(key < place.seqlen_k, minimum(high, place.seqlen_q), low)

    def kind(self, place: Place, query, key) -> Int32:
        """The kind of the block of a query and a key; past the last blocks, that of the last one."""
        kinds, numbers = self.tensors.kinds, zip((query, key), self.block_size, strict=True)
        i, j = (minimum(n // size, most - 1) for (n, size), most in zip(numbers, kinds.shape[:2], strict=True))
        return Int32(kinds[i, j, place.head, minimum(place.entry, kinds.shape[3] - 1)])

    def word(self, place: Place, query, number) -> Uint32:
        """The word with this number among the bits of a query; past the last row or word, that of the last one."""
        bits = self.tensors.bits
        row, column = maximum(minimum(query, bits.shape[0] - 1), 0), minimum(number, bits.shape[1] - 1)
        return Uint32(bits[row, column, place.head, minimum(place.entry, bits.shape[3] - 1)])

    def is_in_seen_block(self, place: Place, query, key) -> Boolean:
        """Whether the kinds and bits of blocks let a query see a key."""
        kind = self.kind(place, query, key)
        if self.tensors.bits is None:
            return kind != 0
        return kind + bit_of(self.word(place, query, key // WORD), key % WORD) >= FULL

    def words_of_row(self, block: Block, r: int, columns: int) -> list[Uint32]:
        """A query's bits from the block's first column on: bit n of word i is that of column 32 * i + n."""
        first, shift = block.first_column // WORD, Uint64(block.first_column % WORD)
        found = [
            Uint64(self.word(block.places[r], block.rows[r], first + i)) for i in range(ceil_div(4 * columns, WORD) + 1)
        ]
        return [Uint32((low | high << Uint64(WORD)) >> shift) for low, high in itertools.pairwise(found)]

    @cute.jit
    def hide_by_kind(self, scores: cute.Tensor, block: Block, hidden: cutlass.Constexpr[float]):
        """Replace the scores of pairs that kinds and bits of blocks hide."""
        place, rows = block.places[0], block.rows
        columns = cute.size(scores, mode=[1])
        if cutlass.const_expr(self.tensors.kinds is not None):
            words = None
            if cutlass.const_expr(self.tensors.bits is not None and not block.has_keys_in_rows):
                words = [self.words_of_row(block, r, columns) for r in range(2)]
            # neither the two rows nor the two columns of a group of 8 lie in different blocks, nor rows in two words
            for c in cutlass.range_constexpr(0, columns, 2):
                column = block.first_column + column_offset(c)
                query, key = (column, rows[0]) if cutlass.const_expr(block.has_keys_in_rows) else (rows[0], column)
                kind = self.kind(place, query, key)
                for n in cutlass.range_constexpr(c, c + 2):
                    offset, word = column_offset(n), None
                    if cutlass.const_expr(self.tensors.bits is not None and block.has_keys_in_rows):
                        word = self.word(place, block.first_column + offset, rows[0] // WORD)
                    for r in cutlass.range_constexpr(2):
                        is_seen = kind != 0
                        if cutlass.const_expr(self.tensors.bits is not None):
                            if cutlass.const_expr(block.has_keys_in_rows):
                                own, number = word, rows[r] % WORD
                            else:
                                own, number = words[r][offset // WORD], offset % WORD
                            # FULL is one more than the kind of a block whose bits count
                            is_seen = kind + bit_of(own, number) >= FULL
                        scores[r, n] = scores[r, n] if is_seen else Float32(hidden)

    def sides(self, has_keys_in_rows: bool) -> tuple[bool, bool]:
        """Whether rows have intervals of columns, and whether columns have intervals of rows."""
        by_key = self.tensors.query_ranges is not None
        return (by_key, self.hides_by_query) if has_keys_in_rows else (self.hides_by_query, by_key)

    def num_masks(self, columns: int, has_keys_in_rows: bool) -> int:
        """How many words `masks` returns."""
        in_rows, in_columns = self.sides(has_keys_in_rows)
        return 2 * in_rows * ceil_div(columns, WORD) + in_columns * ceil_div(4 * columns, 2 * LANES)

    def masks(self, block: Block, columns: int) -> list[Uint32]:
        """The intervals of a block's rows and columns, in bits for `hide`. All lanes of a warp must call it.

        A row's interval becomes a bit for each of the thread's columns. A column's becomes one for each of the warp's
        16 rows: one lane reads it, for all that have scores of the column, and has two columns in a word, 32 apart.
        With two comparisons for each score instead, and intervals read by each of these lanes, a masked block took two
        to three times the instructions.
        """
        place, words, lane = block.places[0], [], cute.arch.lane_idx()
        in_rows, in_columns = self.sides(block.has_keys_in_rows)
        of_row, of_column = self.interval, self.seen_queries
        if block.has_keys_in_rows:
            of_row, of_column = of_column, of_row
        if in_rows:
            intervals = block.intervals or [of_row(*row) for row in zip(block.places, block.rows, strict=True)]
            for interval in intervals:
                bounds = offsets(interval, block.first_column)
                for start in range(0, columns, WORD):
                    words.append(bits_between(*(columns_before(n - column_offset(start)) for n in bounds)))
        if in_columns:
            first_column, first_row = block.first_column - 2 * (lane % 4), block.rows[0] - lane // 4
            for start in range(0, 4 * columns, 2 * LANES):
                word = Uint32(0)
                for i in range(min(2, ceil_div(4 * columns - start, LANES))):
                    interval = of_column(place, first_column + (start + i * LANES) + lane)
                    bounds = [minimum(maximum(n, 0), ROWS) for n in offsets(interval, first_row)]
                    word = word | bits_between(*bounds) << Uint32(ROWS * i)
                words.append(word)
        return words

    @cute.jit
    def hide(
        self,
        scores: cute.Tensor,
        block: Block,
        hidden: cutlass.Constexpr[float],
        masks: list | None = None,
    ):
        """Replace the scores of pairs outside of the intervals of queries and of keys, and of those that blocks hide.

        All lanes of a warp must call it.

        Args: masks: what `masks` has returned; None: it is called now.
        """
        if cutlass.const_expr(self.tensors.kinds is not None):
            self.hide_by_kind(scores, block, hidden)
        columns, lane = cute.size(scores, mode=[1]), cute.arch.lane_idx()
        if cutlass.const_expr(masks is None):
            masks = self.masks(block, columns)
        in_rows, in_columns = self.sides(block.has_keys_in_rows)
        words_of_row = ceil_div(columns, WORD) if cutlass.const_expr(in_rows) else 0
        for r in cutlass.range_constexpr(2 if in_rows else 0):
            for c in cutlass.range_constexpr(columns):
                is_seen = masks[r * words_of_row + c // WORD] & Uint32(1 << c % WORD) != 0
                scores[r, c] = scores[r, c] if is_seen else Float32(hidden)
        between = LANES // 4  # columns of a thread from one to the other of a word
        for c in cutlass.range_constexpr(columns if in_columns else 0):
            if cutlass.const_expr(c // between % 2 == 0):
                source = column_offset(c % between) + 2 * (lane % 4)
                word = masks[2 * words_of_row + c // (2 * between)]
                found = cute.arch.shuffle_sync(word, source) >> Uint32(lane // 4)
                for i in cutlass.range_constexpr(2):
                    if cutlass.const_expr(c + i * between < columns):
                        for r in cutlass.range_constexpr(2):
                            is_seen = found & Uint32(1 << ROWS * i + 8 * r) != 0
                            number = c + i * between
                            scores[r, number] = scores[r, number] if is_seen else Float32(hidden)

    # ---------------------------------------------------------------- terms

    def add_terms(self, scores: cute.Tensor, block: Block) -> None:
        terms = self.terms(block)
        for r in range(2):
            for c in range(cute.size(scores, mode=[1])):
                scores[r, c], _ = terms.added(scores[r, c], r, c)

    def terms(self, block: Block) -> Terms:
        return Terms(self, block)

    def slope(self, place: Place) -> Float32:
        """The slope of a head, in the unit of scores."""
        slopes = self.tensors.slopes
        return slopes[place.head, minimum(place.entry, slopes.shape[1] - 1)] * self.tensors.term_scale

    def bias(self, place: Place, query, key) -> Float32:
        """The bias of a pair; past the last query or key, that of the last one.

        A bias of packed sequences may lack columns, which no host can know; what it has is read then.
        """
        bias = self.tensors.bias
        row = self._bias_row(place, query, bias)
        key = maximum(minimum(key, minimum(place.seqlen_k, bias.shape[1]) - 1), 0)
        return bias[row, key, place.head, place.row_entry].to(Float32)

    def _bias_row(self, place: Place, query, bias: cute.Tensor) -> Int32:
        """A query's row of a bias; the nearest one of a position that is none of its rows."""
        row = self._row(place, query)
        if self.tensors.positions is None:
            return row
        return maximum(minimum(self.tensors.positions[row, place.row_entry], bias.shape[0] - 1), 0)

    def of_pair(self, score: Float32, place: Place, query, key) -> Float32:
        """The score of one pair with its terms; -inf where a bias, the key's range or a block hides it."""
        if self.tensors.query_ranges is not None:
            low, high = self.queries_of_key(place, key)
            score = select_float(low <= query, score, -Float32.inf)
            score = select_float(query < high, score, -Float32.inf)
        if self.tensors.kinds is not None:
            score = select_float(self.is_in_seen_block(place, query, key), score, -Float32.inf)
        if self.tensors.slopes is not None:
            score = score - self.slope(place) * cute.math.absf(Float32(self.position(place, query) - key))
        if self.tensors.bias is not None:
            bias = self.bias(place, query, key)
            score = select_float(bias == -Float32.inf, -Float32.inf, score + bias * self.tensors.term_scale)
        return score

    def pairs_of_query(self, place: Place, query) -> PairsOfQuery:
        return PairsOfQuery(self, place, query)

    def pairs_of_key(self, place: Place, key) -> PairsOfKey:
        return PairsOfKey(self, place, key)

    # ---------------------------------------------------------------- gradients of terms

    @cute.jit
    def add_gradients(self, ds: list, blocks: list, slot: Int32, m_tiles: cutlass.Constexpr[int]):
        """Add what the gradients of scores contribute to those of the slopes and of the bias.

        Args:
            ds: the gradients of a thread's scores with keys in rows, in the order of an accumulator.
            blocks: the `Block` of each of its m_tiles.
            slot: this warp's place in dslopes.
        """
        terms, place = [self.terms(block) for block in blocks], blocks[0].places[0]
        if cutlass.const_expr(self.tensors.dslopes is not None):
            total = Float32(0.0)
            for i in cutlass.range_constexpr(len(ds)):
                m, r, c = element(i, m_tiles)
                total = total - ds[i] * terms[m].distance(r, c)
            total = cute.arch.warp_reduction_sum(total)
            if cute.arch.lane_idx() == 0:
                target = self.tensors.dslopes
                target[slot, place.head, place.entry] = target[slot, place.head, place.entry] + total
        if cutlass.const_expr(self.tensors.dbias is not None):
            for i in cutlass.range_constexpr(len(ds)):
                m, r, c = element(i, m_tiles)
                query, key = terms[m].pair(r, c)
                if ds[i] != 0.0 and key < self.tensors.dbias.shape[1]:
                    row = self._row(place, query)
                    if cutlass.const_expr(not self.is_deterministic):
                        row = self._bias_row(place, query, self.tensors.dbias)
                    coordinate = (row, key, place.head, place.row_entry)
                    add_one_to_global(cute.domain_offset(coordinate, self.tensors.dbias).iterator, ds[i])

    # ---------------------------------------------------------------- dropout

    def drop(self, probabilities: cute.Tensor, block: Block) -> None:
        """Set the probabilities that are left out to 0."""
        columns = cute.size(probabilities, mode=[1])
        kept = self.kept(block, columns)
        for r in range(2):
            for c in range(columns):
                probabilities[r, c] = select_float(kept.is_kept(r, c), probabilities[r, c], 0.0)

    def kept(self, block: Block, columns: int) -> KeptPairs:
        return KeptPairs(self, block, columns)

    def words(self, place: Place, row_group, column_group, keys: list | None = None) -> tuple:
        """The 128 random bits of the pairs of these groups of rows and columns, see geometry/philox.py.

        Args: keys: `round_keys`, where a kernel has them.
        """
        instance = place.entry * self.tensors.all_heads + self.tensors.first_head + place.head
        counter = column_group, row_group, instance, self.random_key[0]
        return philox(counter, keys or philox_keys(self.random_key[1:]))

    def round_keys(self) -> list[tuple]:
        """The two words of each round of the generator."""
        return list(philox_keys(self.random_key[1:]))

    def _random_key(self) -> list:
        """The low half of the offset, and a key of two words of the seed and the high half of the offset."""
        state = self.tensors.dropout_state
        words = state[2], state[0], state[1] ^ state[3]
        return [cute.arch.make_warp_uniform(word) for word in words]

    def keep_factor(self, place: Place, query, key) -> Float32:
        """What dropout multiplies the probability of a pair with."""
        if not self.drops:
            return Float32(1.0)
        return select_float(self.is_kept(place, query, key), self.tensors.keep_scale, 0.0)

    def is_kept(self, place: Place, query, key) -> Boolean:
        """Whether dropout keeps one pair."""
        row = self.number(place, query)
        words = self.words(place, group_of(row), group_of(key))
        low, high = select(bit(key, 0), words[1], words[0]), select(bit(key, 0), words[3], words[2])
        word = select(bit(key, 3), high, low)
        return (word >> 8 * ((row & 1) + 2 * (row >> 3 & 1)) & 255) < self.tensors.keep_bytes


class PairsOfQuery(Untraced):
    """The modifiers of one query's pairs, for a row that is recomputed."""

    def __init__(self, modifiers: Modifiers, place: Place, query):
        self.modifiers, self.place, self.query = modifiers, place, query

    def score(self, score: Float32, key) -> Float32:
        return self.modifiers.of_pair(score, self.place, self.query, key)

    def weight(self, p: Float32, key) -> Float32:
        """The probability of a key that dropout keeps."""
        if not self.modifiers.drops:
            return p
        return select_float(self.modifiers.is_kept(self.place, self.query, key), p, 0.0)

    def keep_factor(self, key) -> Float32:
        """What dropout multiplies the probability of a pair with."""
        return self.modifiers.keep_factor(self.place, self.query, key)


class PairsOfKey(Untraced):
    """The modifiers of one key's pairs."""

    def __init__(self, modifiers: Modifiers, place: Place, key):
        self.modifiers, self.place, self.key = modifiers, place, key

    def score(self, score: Float32, query) -> Float32:
        """The score with its terms; -inf where the query does not see the key."""
        score = self.modifiers.of_pair(score, self.place, query, self.key)
        if not self.modifiers.has_intervals:
            return score
        low, high = self.modifiers.interval(self.place, query)
        score = select_float(low <= self.key, score, -Float32.inf)
        return select_float(self.key < high, score, -Float32.inf)

    def keep_factor(self, query) -> Float32:
        """What dropout multiplies the probability of a pair with."""
        return self.modifiers.keep_factor(self.place, query, self.key)


def element(i: int, m_tiles: int) -> tuple[int, int, int]:
    """The m_tile, the row and the column of an accumulator's i-th value, ((2, 2), m_tiles, N)."""
    return i // 4 % m_tiles, i // 2 % 2, i // (4 * m_tiles) * 2 + i % 2


def select_float(condition, a, b) -> Float32:
    return Float32(select(condition, Float32(a), Float32(b)))


class Terms:
    """The terms of a block of scores, element by element, while a kernel is traced.

    What does not differ between the columns is computed here, once.
    """

    def __init__(self, modifiers: Modifiers, block: Block):
        self.modifiers, self.block = modifiers, block
        tensors = modifiers.tensors
        self.has_alibi, self.has_bias = tensors.slopes is not None, tensors.bias is not None
        if not self.has_alibi:
            return
        self.slopes = 2 * [block.slope] if block.slope is not None else [modifiers.slope(p) for p in block.places]
        if not block.has_keys_in_rows:
            # position - key: the key of column c lies column_offset(c) behind the first one
            rows = zip(block.places, block.rows, strict=True)
            self.base = [Float32(modifiers.position(place, row) - block.first_column) for place, row in rows]
        elif tensors.positions is None:
            first = modifiers.position(block.places[0], block.first_column)
            self.base = [Float32(first - row) for row in block.rows]
        else:
            self.base = [Float32(-row) for row in block.rows]

    def distance(self, r: int, c: int) -> Float32:
        """|position - key| of an element."""
        if not self.block.has_keys_in_rows:
            return cute.math.absf(self.base[r] - float(column_offset(c)))
        if self.modifiers.tensors.positions is None:
            return cute.math.absf(self.base[r] + float(column_offset(c)))
        position = self.modifiers.position(self.block.places[r], self.block.first_column + column_offset(c))
        return cute.math.absf(Float32(position) + self.base[r])

    def pair(self, r: int, c: int) -> tuple:
        """The query and the key of an element."""
        row, column = self.block.rows[r], self.block.first_column + column_offset(c)
        return (column, row) if self.block.has_keys_in_rows else (row, column)

    def added(self, score: Float32, r: int, c: int) -> tuple:
        """The score of an element with its terms, -inf where a bias hides it; and whether one does, or None."""
        is_hidden = None
        if self.has_alibi:
            score = score - self.slopes[r] * self.distance(r, c)
        if self.has_bias:
            bias = self.modifiers.bias(self.block.places[r], *self.pair(r, c))
            is_hidden = bias == -Float32.inf
            score = select_float(is_hidden, -Float32.inf, score + bias * self.modifiers.tensors.term_scale)
        return score, is_hidden
