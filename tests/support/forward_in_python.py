"""The Hopper forward as Python: the kernel's own warps, with symbols for values (hopper_in_python.py).

A warpgroup of consumers is one process. A buffer of K holds the name of a block of keys, S the block of Q and that of
K, O a sum of terms (Q, block of K, block of V). A finished tile is compared with the mask: O has each visible block
once, masked if some pair is hidden, all relative to one reference; and so has the row sum.
"""

import functools
from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

import kernel_language
from hopper_in_python import WARPS, Operand, Registers, Rows, Tensor
from kernel_language import Divisor, Nothing, Slices, device_modules

from onepass.geometry.block_range import KeyBlocks
from onepass.geometry.splits import Splits
from onepass.problem import V_KEYS

FORWARD = "sm90.forward."


class Tag(NamedTuple):
    """A block of a tensor. Attributes: half: of float32. cleared: the first key that is zero."""

    tensor: str
    head: int
    origin: int
    block: int
    half: int = 0
    cleared: int | None = None

    def whole(self):
        return self._replace(half=0, cleared=None)


class Scores(NamedTuple):
    """What a score buffer or P holds. Attributes: stage: "raw", "modified" or "exponentials"."""

    q: Tag
    k: Tag
    stage: str = "raw"
    is_masked: bool = False
    is_dropped: bool = False
    reference: int | None = None
    half: int = 0


class Term(NamedTuple):
    """A product of P and V. Attributes: columns: the number of its block of columns."""

    p: Scores
    v: Tag
    columns: int


class Sum(NamedTuple):
    """What a block of columns of O is: terms of one reference."""

    terms: tuple
    reference: int

    def __add__(self, other):
        if other == 0.0:
            return self
        assert self.reference == other.reference, "P V is added to O of another reference"
        return Sum(self.terms + other.terms, self.reference)

    def __radd__(self, other):
        assert other == 0.0, "O is not zero at first"
        return self


def take(scores, expected, **changes):
    value = scores.content
    assert value.stage == expected, f"scores are {value.stage}, expected {expected}"
    scores.fill(value._replace(**changes))


class Mma(Slices):
    """A GEMM whose result has one register for each block of so many columns."""

    def partition_shape_C(self, shape):
        return shape[1] // self.columns

    def partition_shape_A(self, shape):
        return 1


# ---------------------------------------------------------------- what stands for parts of the warps


class Softmax:
    """The online softmax. Attributes: row_max: its reference, row_sum: the blocks in the sum, each of two rows."""

    def __init__(self, random):
        self.random, self.row_max, self.row_sum, self.is_behind, self.p = random, [0, 0], [(), ()], False, Registers(1)

    def _exponentiate(self, scores, sums):
        take(scores, "modified", stage="exponentials", reference=self.row_max[0])
        self.row_sum = [(*sums, scores.content.k)] * 2
        self.p.fill(scores.content)

    def _next_reference(self):
        self.row_max = [self.row_max[0] + 1] * 2

    def begin(self, scores):
        assert not self.is_behind, "O has not been brought to its reference"
        self._next_reference()
        self._exponentiate(scores, ())

    def update(self, scores):
        assert not self.is_behind, "O has not been brought to its reference"
        self._next_reference()
        self.is_behind = True
        self._exponentiate(scores, self.row_sum[0])

    def update_lazily(self, scores, is_masked, acc_o=None):
        assert is_masked or not scores.content.is_masked
        if self.random.random() < 0.5:
            self._next_reference()
            self.is_behind = True
            if acc_o is not None:
                self.rescale(acc_o)
        self._exponentiate(scores, self.row_sum[0])

    def rescale(self, acc_o):
        for i in range(len(acc_o)):
            acc_o[i] = acc_o[i] and acc_o[i]._replace(reference=self.row_max[0])
        self.is_behind = False

    def rescale_lazily(self, acc_o):
        if self.is_behind:
            self.rescale(acc_o)


class Scales:
    """The scales of scores; each method says for which tile it was called."""

    def __init__(self, kernel, rows, inputs):
        self.kernel, self.loaded, self.softmax = kernel, None, Softmax(kernel.machine.random)

    def load(self, tile):
        self.loaded = tile

    def apply(self, acc_s, tile, n_block, begins):
        value = acc_s.content
        assert value.k.block // self.kernel.score_buffers == n_block, "scores of another block"
        assert (value.k.origin, value.q.head) == (tile.origin_k, tile.head)
        if self.kernel.score_buffers == 1:
            assert (self.loaded.head, self.loaded.m_block, self.loaded.origin_q) == (
                tile.head,
                tile.m_block,
                tile.origin_q,
            )
            assert begins == (n_block == tile.last - 1)
        take(acc_s, "raw", stage="modified")


class TileModifiers:
    """The modifiers of a tile's scores, with intervals and dropout."""

    def __init__(self, kernel, rows, gemms, modifiers):
        self.gemms = gemms

    def load(self, tile):
        pass

    def add_terms(self, tile, n_block, buffer):
        pass

    def _take(self, tile, n_block, buffer, expected, **changes):
        value = self.gemms.s[buffer].content
        assert (value.k.block, value.q.head, value.is_dropped) == (n_block, tile.head, False)
        take(self.gemms.s[buffer], expected, **changes)

    def hide(self, *block):
        self._take(*block, "modified", is_masked=True)

    def drop(self, *block):
        self._take(*block, "exponentials", is_dropped=True)

    def drop_packed(self, rP):
        pass


class Intervals:
    """The modifiers of queries that see keys. Args: keys_of: a function (query, seqlen_k) -> (low, high)."""

    has_intervals = True

    def __init__(self, keys_of, *_):
        self.keys_of = keys_of

    def key_blocks(self, rows, seqlen_k, tile_n):
        keys = [self.keys_of(query, seqlen_k) for place, query in rows if query < place.seqlen_q]
        keys = [(low, high) if low < high else (seqlen_k, 0) for low, high in keys] or [(seqlen_k, 0)]
        low, high = min(k[0] for k in keys), max(k[1] for k in keys)
        first = min(low, max(seqlen_k - 1, 0)) // tile_n
        last = max(-(-high // tile_n), first + 1)
        clear_last = max(min(min(k[1] for k in keys) // tile_n, last), first)
        clear_first = max(min(-(-max(k[0] for k in keys) // tile_n), clear_last), first)
        return KeyBlocks(first, clear_first, clear_last, last)


class Boxes:
    """`BoxLocations`: the page of a box says which block of keys it is a part of."""

    def __init__(self, pages, num_pages, box_rows, count):
        self.count, self.k_boxes, self.v_boxes = count, None, None

    def look_up(self, origin, block, seqlen_k):
        self.keep()
        self.k_boxes = origin, block

    def keep(self):
        self.v_boxes = self.k_boxes

    def box(self, locations, number):
        return (*locations, number), number


class Source(Rows):
    @property
    def content(self):
        return Tag(*super().content)


class BoxesOfPages(Source):
    def __getitem__(self, index):
        if len(index) < 4:
            return super().__getitem__(index)
        _, box, head, (origin, block, number) = index
        assert box == number
        return Source(self.name, self.num_bytes, place=(0, head, origin, block))


class Transposer:
    """A warp's share of transposing tiles of V."""

    def __init__(self, launch, keys, head_dim_v, raw, target, ahead):
        self.launch, self.size, self.raw, self.tiles = launch, keys * head_dim_v, raw, target
        self.source = self.target = 0

    def transpose(self, source, target):
        assert source % self.size == target % self.size == 0
        self.launch.pass_on(self.raw[source // self.size], self.tiles[target // self.size])


class Converter:
    """A warp's share of converting tiles of K or V."""

    def __init__(self, launch, keys, head_dim, dtype, raw, target):
        self.launch, self.raw, self.target = launch, raw, target

    def convert(self, raw, index, signs):
        tag = self.launch.pass_on(self.raw[raw], self.target[index])
        expected = None
        if tag.tensor == "k" and self.launch.kernel.has_descales:
            expected = 0x80808080 if tag.head % 2 else 0
        assert signs == expected or signs % 2**32 == expected


def clear(buffer, first, thread, num_threads):
    tag = buffer.content._replace(cleared=max(first, 0))
    buffer.parts = dict.fromkeys(buffer.parts, tag)


# ---------------------------------------------------------------- a launch


@functools.cache
def modules():
    return device_modules(FORWARD + "kernel")


class Launch(kernel_language.Launch):
    """A forward.

    Attributes: stored: for each warpgroup's rows of a tile what was stored: O, row sum and reference.
    """

    def __init__(
        self,
        problem,
        config,
        seed,
        *,
        intervals=None,
        sequences=None,
        num_splits=1,
        num_ctas=1,
        box_rows=None,
        **options,
    ):
        """Args:
        intervals: the keys of a query as a function (query, seqlen_k) -> (low, high).
        sequences: of packed tiles: results of PackedSchedule.find.
        """
        width = 8 if problem.quantization is not None else 16
        options |= {"box_rows": box_rows, "is_split": num_splits > 1}
        kernel = modules()[FORWARD + "kernel"].ForwardSm90(problem, config, SimpleNamespace(width=width), **options)
        super().__init__(modules(), kernel, seed)
        self.problem, self.config, self.intervals, self.sequences = problem, config, intervals, sequences
        self.num_splits, self.num_ctas, self.stored = num_splits, num_ctas, {}
        self.first_wg = int(config.warp_specialized)
        boxes = kernel.buffer_n // kernel.box_rows if kernel.is_paged else kernel.cluster_size
        self.raw_parts = boxes
        v_parts = WARPS if kernel.converts else 2 if kernel.transposes_v else boxes
        self.parts = {"q": 1, "k": WARPS if kernel.converts else boxes, "v": v_parts}
        self.replace_kernel()

    def replace_kernel(self):
        m = self.modules
        packed = SimpleNamespace(num_tiles=len(self.sequences or ()), find=lambda number: self.sequences[number])
        self.replace_parts(
            at_head=self.at_head,
            PackedSchedule=lambda *_: packed,
            BoxLocations=Boxes,
            row_boxes=Nothing(),
            first_rows=Nothing(),
            make_scales=Scales,
            TileModifiers=TileModifiers,
            Modifiers=Intervals,
            mask=SimpleNamespace(apply=self.mask),
            pack=self.pack,
            pack_halves=self.pack,
            scaled=SimpleNamespace(pack_p=self.pack, copy_p=self.pack),
            clear_rows=clear,
            clear_keys=clear,
            Transposer=functools.partial(Transposer, self),
            Converter=functools.partial(Converter, self),
            wgmma=SimpleNamespace(
                issue_sum=self.issue_sum, block_of_columns=Operand, products=m["blocks.memory.wgmma"].products
            ),
        )
        m[FORWARD + "kernel"].LANES = m[FORWARD + "own_blocks"].LANES = 1
        m[FORWARD + "output"].Output.store = lambda output, tile: self.store(output, tile)
        pingpong, producer = m["blocks.tiles.pingpong"].Pingpong, m[FORWARD + "producer"].Producer

        class WatchedTurns(pingpong):
            """Turns of which the thread block notes who has one."""

            def wait(own):
                super().wait()
                self.machine.current.block.turn = own.wg

            def pass_on(own):
                self.machine.current.block.turn = None
                super().pass_on()

        class WatchedProducer(producer):
            def run(own, *arguments):
                super().run(*arguments)
                pipes = () if self.kernel.converts else (own.pipes.k, own.pipes.v)
                assert all(map(self.is_released, pipes)), "shared memory is gone while others arrive there"

        m[FORWARD + "consumer"].Pingpong, m[FORWARD + "kernel"].Producer = WatchedTurns, WatchedProducer

    # ---------------------------------------------------------------- loads

    def local_tile(self, t, shape, coordinates):
        dtype = self.kernel.dtype if t.name == "q" else self.kernel.kv_dtype
        is_paged = self.kernel.is_paged and t.name != "q"
        kind = BoxesOfPages if is_paged else Source
        return kind(t.name, shape[0] * shape[1] * dtype.width // 8, place=(coordinates[1] or 0,))

    def at_head(self, t, m, head, origin, is_packed, along=0):
        assert along == (m.name == "v" and self.kernel.loads_keys_last)
        return t[None, None, head, origin]

    def pass_on(self, raw, target):
        """A warp's share of a tile goes from one buffer to another."""
        assert len(raw.parts) == self.raw_parts
        target.write(self.machine.current.warp % WARPS, raw.content)
        return raw.content

    def is_released(self, pipe):
        return all((pipe.full + i).value.ended == (pipe.empty + i).value.ended for i in range(pipe.stages))

    # ---------------------------------------------------------------- scores and results

    def has_turn(self):
        wg = self.machine.current.warp // WARPS - self.first_wg
        return not self.config.pingpong or self.config.num_warpgroups == 1 or self.machine.current.block.turn == wg

    def tag(self, operand):
        """What an operand in shared memory is, which all of its writers have written."""
        buffer = getattr(operand, "buffer", operand)
        tag = buffer.content
        assert len(buffer.parts) == self.parts[tag.tensor], "a part is missing"
        return tag

    def issue_sum(self, mma, acc, pairs, accumulate):
        """A group of GEMMs; results of float32 are those of three pairs of halves."""
        process, halves = self.machine.current, [(0, 0)] if self.kernel.num_halves == 1 else [(1, 0), (0, 1), (0, 0)]
        operands = [getattr(operand, "buffer", operand) for pair in pairs for operand in pair]
        if mma == "qk":
            found = [(self.tag(q), self.tag(k)) for q, k in pairs]
            assert [(q.half, k.half) for q, k in found] == halves
            ((q, k),) = {(q.whole(), k.whole()) for q, k in found}
            assert self.has_turn() or process.seen != q, "S of a step out of turn"
            acc.fill(Scores(q, k))
        else:
            found = [(p.content, self.tag(v)) for p, v in pairs]
            assert self.has_turn() or not process.gemms, "P V of a step out of turn"
            p, v = found[-1]
            assert {tag._replace(half=0) for _, tag in found} == {v}, "halves of different tiles"
            product = 0.0
            if p != 0.0:
                assert [(p.half, v.half) for p, v in found] == halves
                columns = getattr(pairs[-1][1], "coordinate", 0)
                product = Sum((Term(p, v, columns),), p.reference)
            before = acc.content if accumulate else 0.0
            acc.fill(before + product)
        self.machine.begin_gemms(acc, operands)

    def pack(self, scores, *targets):
        """The exponentials become P."""
        assert scores.content.stage == "exponentials"
        for half, target in enumerate(targets):
            target.fill(scores.content._replace(half=half))
        self.machine.current.seen = scores.content.q  # what comes before this in a tile comes out of turn

    def mask(self, scores, rows, n_start, lane, geometry):
        value, wgs = scores.content, self.config.num_warpgroups
        assert n_start == value.k.block * self.kernel.buffer_n
        assert rows[0] == value.q.block * (self.kernel.tile_m // wgs), "a mask for other rows"
        take(scores, "modified", is_masked=True)

    def store(self, output, tile):
        o = output.gemms.o
        key = tile_key(tile), output.thread.wg
        assert key not in self.stored, "a tile is stored twice"
        self.stored[key] = [o[i] for i in range(len(o))], output.done_sum[0], output.done_max[0]
        o.fill("stored")

    # ---------------------------------------------------------------- the arguments of the kernel

    def run(self):
        kernel, config, problem, m = self.kernel, self.config, self.problem, self.modules
        kv_heads, entries = problem.num_heads_kv, problem.batch
        q, k, v = (
            Tensor(name, (length, columns, heads, entries))
            for name, length, columns, heads in (
                ("q", problem.seqlen_q, kernel.head_dim, problem.num_heads_q),
                ("k", problem.seqlen_k, kernel.head_dim, kv_heads),
                ("v", problem.seqlen_k, kernel.head_dim_v, kv_heads),
            )
        )
        schedule_module, kernel_module = m["blocks.tiles.schedule"], m[FORWARD + "kernel"]
        window = problem.mask.window_left, problem.mask.window_right
        scores = schedule_module.ScoreArguments(None, Nothing(), *window, self.intervals)
        lengths = m["blocks.tiles.packed"].Lengths(None, None, None)
        heads = problem.num_heads_q // kernel.group
        clusters = kernel.cluster_size
        blocks = None if self.sequences is not None else -(-problem.seqlen_q // (kernel.tile_m * clusters))
        schedule = schedule_module.make_schedule(blocks, heads, entries * self.num_splits, 1)
        schedule = schedule._replace(splits=Splits(self.num_splits, 0), entries=Divisor(entries))
        descales = None
        if kernel.has_descales:
            descales = SimpleNamespace(k={(o, h, 0): (-1.0) ** h for o in range(8) for h in range(8)})
        v_box = (kernel.head_dim_v, kernel.buffer_n)
        k_layout, v_layout = (SimpleNamespace(outer=s, inner=None) for s in ((kernel.buffer_n, kernel.head_dim), v_box))
        v_rows = SimpleNamespace(outer=v_box[::-1], inner=None)
        v_layout = v_layout if kernel.is_fp8 else v_rows
        qk, pv = Mma("qk"), Mma("pv")
        qk.columns, pv.columns = kernel.buffer_n, kernel.pv_columns
        arguments = (
            m[FORWARD + "tile"].Loads(*((Nothing(), t) for t in (q, k, v))),
            kernel_module.Tensors(Tensor(), Tensor(), None, None),
            lengths,
            SimpleNamespace(capacity=problem.seqlen_k) if kernel.is_paged else None,
            descales,
            scores,
            schedule,
            self.counter if config.dynamic_tiles else None,
            (qk, pv),
            kernel_module.Layouts(k_layout, k_layout, v_layout, k_layout, v_rows),
        )
        consumers = [WARPS * (self.first_wg + wg) for wg in range(config.num_warpgroups)]
        self.machine.launch(
            functools.partial(kernel.kernel, *arguments),
            self.num_ctas * clusters,
            kernel.num_threads // 32,
            clusters,
            warpgroups=consumers,
        )
        if self.sequences is not None:
            schedule = kernel_module.PackedSchedule()
        seqlens = scores.sequences(problem.seqlen_q, problem.seqlen_k, lengths)
        tiles = []
        for rank in range(clusters):
            self.machine.current = SimpleNamespace(block=SimpleNamespace(rank=rank), lane=0)
            tiles += [kernel.tile_at(number, schedule, seqlens) for number in range(schedule.num_tiles)]
        self.check(tiles)

    # ---------------------------------------------------------------- what is left

    def check(self, tiles):
        kernel, wgs = self.kernel, range(self.config.num_warpgroups)
        for block in self.machine.blocks:
            for number, pipe in enumerate(block.pipes):
                # the note after the last tile comes without a load
                assert self.is_released(pipe) or (kernel.converts and number == 3), "buffers that are not released"
        assert not any(self.counter.values.values()), "the next launch would begin with another number"
        assert self.stored.keys() == {(tile_key(tile), wg) for tile in tiles for wg in wgs}, "tiles"
        for tile in tiles:
            for wg in wgs:
                self.check_tile(wg, tile, *self.stored[tile_key(tile), wg])

    def check_tile(self, wg, tile, sums, row_sum, reference):
        kernel, wgs = self.kernel, self.config.num_warpgroups
        start = tile.m_block * kernel.tile_m + wg * kernel.tile_m // wgs
        rows = range(start, min(start + kernel.tile_m // wgs, tile.geometry.seqlen_q))
        keys = [self.keys_of(row, tile) for row in rows]
        q = Tag("q", tile.head, tile.origin_q, tile.m_block * wgs + wg)
        head_kv = tile.head // kernel.tile_heads_per_kvhead
        n, origin_v = kernel.buffer_n, tile.origin_k
        if kernel.packs_keys and kernel.loads_keys_last:
            origin_v = (tile.origin_k // V_KEYS + tile.sequence) * V_KEYS
        if not rows:
            return  # computed in vain
        for columns, out in enumerate(sums):
            assert out.reference == reference
            blocks = [term.p.k.block for term in out.terms]
            assert Counter(blocks) == Counter(k.block for k in row_sum)
            assert len(set(blocks)) == len(blocks), "a block that is added twice"
            for (p, v, of_columns), block in zip(out.terms, blocks, strict=True):
                assert (p.q, p.k) == (q, Tag("k", head_kv, tile.origin_k, block))
                assert (v.whole(), of_columns) == (Tag("v", head_kv, origin_v, block), columns)
                is_clear = all(low <= block * n and block * n + n <= high for low, high in keys)
                assert p.is_masked or is_clear, "a block with hidden pairs is not masked"
                past = tile.geometry.seqlen_k - block * n
                first_zero = n if v.cleared is None else min(v.cleared, n)
                assert first_zero == (max(0, min(past, n)) if kernel.has_garbage else n), "V past the end is not zero"
                assert p.is_dropped == (self.intervals is not None)
            every = range(-(-tile.geometry.seqlen_k // n))
            if kernel.is_split:
                every = range(tile.first, min(tile.last, len(every)))
            for block in every:
                is_visible = any(low < block * n + n and block * n < high for low, high in keys if low < high)
                assert not is_visible or block in blocks, "a visible block is left out"

    def keys_of(self, row, tile):
        if self.intervals is not None:
            return self.intervals(row, tile.geometry.seqlen_k)
        _, seqlen_k, left, right = tile.geometry
        position = row + seqlen_k - tile.geometry.seqlen_q
        low = 0 if left is None else max(position - left, 0)
        return low, seqlen_k if right is None else min(seqlen_k, position + right + 1)


def tile_key(tile):
    return tile.m_block, tile.head, tile.origin_q, tile.origin_k, tile.origin_out
