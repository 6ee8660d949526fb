"""The roles of the Hopper forward on the CPU (support/roles.py): which products reach which row, and in which order.

A value is what it was made of. K in shared memory is the name of a block of keys, S the block of Q and that of K, O a
sum of terms (Q, block of K, block of V, reference of P). A finished tile is compared with the mask: O has each visible
block once, masked if some pair is hidden, all in one reference; and so has the row sum.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

from roles import Machine, MBarrier, NamedBarrier, Pipe, Register, TensorCores, as_python, language, link

from onepass.geometry.block_range import KeyBlocks
from onepass.geometry.splits import Splits
from onepass.geometry.tile_scheduler import Divisors
from onepass.problem import V_KEYS

WG_THREADS = 128
SOURCE = "sm90.forward."


class Tag(NamedTuple):
    """A block of a tensor. Attributes: part: a float16 half of it, or a box. cleared: the first key that is zero."""

    tensor: str
    head: int
    origin: int
    block: int
    part: int = 0
    cleared: int | None = None

    def whole(self):
        return self._replace(part=0, cleared=None)


class Term(NamedTuple):
    q: Tag
    k: Tag
    v: Tag
    is_masked: bool
    is_dropped: bool


class Sum(NamedTuple):
    """What O is: terms of one reference."""

    terms: tuple = ()
    reference: int | None = None

    def __add__(self, other):
        assert not self.terms or self.reference == other.reference, "P V is added to O of another reference"
        return Sum(self.terms + other.terms, other.reference)


class Scores(Register):
    """An accumulator of S, which also is P V where these share registers."""

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return self.value

    def take(self, stage: str, then: str):
        assert self.value.stage == stage, f"scores are {self.value.stage}, expected {stage}"
        self.value.stage = then


class Sums(Register):
    """O, in blocks of columns."""

    def __init__(self, name, blocks=1):
        super().__init__(name)
        self._value = [Sum()] * blocks

    def __len__(self):
        return 1

    def fill(self, zero):
        assert zero == 0.0
        self.value = [Sum()] * len(self.value)

    def __getitem__(self, index):
        if isinstance(index, tuple):
            return Columns(self, index[2])
        return self.value[index]

    def __setitem__(self, index, value):
        self.value = [value if i == index else old for i, old in enumerate(self.value)]


class Columns(NamedTuple):
    sums: Sums
    block: int

    def __getitem__(self, index):
        return self.sums[self.block]

    def __setitem__(self, index, value):
        self.sums[self.block] = value


class P(Register):
    def fill(self, zero):
        assert zero == 0.0
        self.value = SimpleNamespace(stage="zero")


class Operand(NamedTuple):
    """A tile in shared memory, in one buffer or in the shares that several warps write."""

    buffers: list
    columns: int = 0

    def read(self) -> Tag:
        found = [buffer.read() for buffer in self.buffers]
        assert len({tag.whole() for tag in found}) == 1, "a tile of two blocks"
        return found[0]


class Fragment:
    """Operands by the number of their buffer."""

    def __init__(self, pipe: Pipe, shares: int):
        self.pipe, self.shares = pipe, shares

    def __getitem__(self, index):
        number = index[-1]
        return Operand(self.pipe.buffers[number * self.shares : (number + 1) * self.shares])


class Softmax:
    """The online softmax. Attributes: row_max: its reference, row_sum: the blocks in the sum, each of two rows."""

    def __init__(self, machine: Machine):
        self.machine, self.row_max, self.row_sum, self.is_behind = machine, [0, 0], [(), ()], False
        self.p = Scores("P of codes")

    def _exponentiate(self, scores, sums):
        scores.take("modified", "exponentials")
        self.row_sum = [(*sums, scores.value.k)] * 2
        scores.value.reference = self.row_max[0]
        self.p.value = scores.value

    def begin(self, scores):
        assert not self.is_behind, "O has not been brought to its reference"
        self.row_max = [self.row_max[0] + 1] * 2
        self._exponentiate(scores, ())

    def update(self, scores):
        assert not self.is_behind, "O has not been brought to its reference"
        self.row_max, self.is_behind = [self.row_max[0] + 1] * 2, True
        self._exponentiate(scores, self.row_sum[0])

    def update_lazily(self, scores, is_masked, acc_o=None):
        assert is_masked or not scores.value.is_masked
        if self.machine.random.random() < 0.5:
            self.row_max, self.is_behind = [self.row_max[0] + 1] * 2, True
            if acc_o is not None:
                self.rescale(acc_o)
        self._exponentiate(scores, self.row_sum[0])

    def rescale(self, acc_o):
        acc_o.value = [Sum(s.terms, self.row_max[0]) for s in acc_o.value]
        self.is_behind = False

    def rescale_lazily(self, acc_o):
        if self.is_behind:
            self.rescale(acc_o)


class Forward:
    """A thread block. Attributes: stored: for each warpgroup, tiles with what was stored: O, row sum and reference."""

    def __init__(
        self,
        problem,
        config,
        seed: int,
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
        machine = self.machine = Machine(seed)
        self.problem, self.config, self.intervals, self.sequences = problem, config, intervals, sequences
        self.barriers: dict[int, NamedBarrier] = {}
        self.stored: dict[int, list] = {}
        self.turn: int | None = None
        self.cores: dict[int, TensorCores] = {}
        self.p: dict[int, P] = {}
        stand_ins = language(
            machine,
            warp_idx=lambda: 0 if machine.current.name == "consumer 0" else 4,
            barrier=lambda barrier_id, number_of_threads: self._barrier(barrier_id).sync(number_of_threads, WG_THREADS),
            barrier_arrive=lambda barrier_id, number_of_threads: self._barrier(barrier_id).arrive(
                number_of_threads, WG_THREADS
            ),
        )
        names = "kernel", "consumer", "gemms", "scores", "rows", "own_blocks", "own_loads", "past_the_end", "output"
        names += "producer", "transposer", "converter"
        self.modules = {name: as_python(SOURCE + name, stand_ins | {"LANES": 1}) for name in names}
        for name, source in (("pingpong", "tiles.pingpong"), ("queue", "tiles.queue"), ("wgmma", "memory.wgmma")):
            self.modules[name] = as_python(f"blocks.{source}", stand_ins)
        link(list(self.modules.values()))
        self.kernel = self._kernel(box_rows, num_splits, options)
        self._make_pipes()
        self.queue = self._queue(num_ctas)
        self.producer = self._producer()

    def run(self):
        kernel, config = self.kernel, self.config
        consumers = {w: self._consumer(w) for w in range(config.num_warpgroups)}
        way = "run_blocks" if config.score_buffers == 1 else "run_halves"
        roles = {
            f"consumer {w}": lambda c=c: getattr(c, way)(self.queue, self.schedule, self.seqlens)
            for w, c in consumers.items()
        }
        if config.warp_specialized:
            roles["producer"] = self._produce
        if config.dynamic_tiles:
            roles["scheduler"] = self.queue.fill
        if kernel.transposes_v:
            for i in range(2):
                roles[f"transposer {i}"] = lambda i=i: self._transposer(i).run(self.queue, self.schedule, self.seqlens)
        if kernel.converts:
            for i in range(4):
                roles[f"converter {i}"] = self._converter(i).run
        self.machine.run(roles)
        self._check()

    # ---------------------------------------------------------------- what roles share

    def _kernel(self, box_rows, num_splits, options):
        module = self.modules["kernel"]
        options |= {"box_rows": box_rows, "is_split": num_splits > 1}
        kernel = module.ForwardSm90(self.problem, self.config, "16 bits", **options)
        kernel.at_head = lambda t, m, head, origin: Head(t, head, origin)

        def keys_at_head(t, m, head, origin, along=0):
            assert along == (t.tensor == "v" and kernel.loads_keys_last)
            return Head(t, head, origin)

        kernel.keys_at_head = keys_at_head
        problem = self.problem
        if self.sequences is None:
            blocks = -(-problem.seqlen_q // kernel.tile_m)
            heads = problem.num_heads_q // kernel.group
            self.schedule = SimpleNamespace(
                num_tiles=blocks * heads * problem.batch * num_splits,
                divisors=Divisors(blocks, 1, 1, heads),
                tiles_of_head=blocks,
                batch=problem.batch * num_splits,
                splits=Splits(num_splits, 0),
                entries=problem.batch,
            )
        else:
            self.schedule = SimpleNamespace(num_tiles=len(self.sequences), find=lambda number: self.sequences[number])
        window = (None, None) if kernel.has_intervals else (problem.mask.window_left, problem.mask.window_right)
        self.modifiers = Intervals(self) if kernel.has_intervals else None
        lengths = SimpleNamespace(seqused_k=None)
        self.seqlens = SimpleNamespace(
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            window_left=window[0],
            window_right=window[1],
            lengths=lengths,
            modifiers=self.modifiers,
        )
        return kernel

    def _make_pipes(self):
        kernel, config, machine = self.kernel, self.config, self.machine
        wgs, halves = config.num_warpgroups, kernel.num_halves
        converters, transposers = 4 * kernel.converts, 2 * kernel.transposes_v
        boxes = kernel.buffer_n // kernel.box_rows if kernel.is_paged else 1
        v_writers = converters or transposers
        q = Pipe(machine, "Q", wgs * config.q_stages, 1, halves)
        k = Pipe(machine, "K", kernel.k_stages, wgs, halves * boxes, converters)
        v = Pipe(machine, "V", kernel.v_stages, wgs, halves * boxes, v_writers)
        self.pipes = self.loaded = SimpleNamespace(q=q, k=k, v=v)
        if v_writers:
            raw_v = Pipe(machine, "raw V", kernel.loaded_v_stages, v_writers, boxes)
            raw_k = Pipe(machine, "raw K", kernel.loaded_k_stages, converters, boxes) if converters else k
            self.loaded = SimpleNamespace(q=q, k=raw_k, v=raw_v)
        self.notes = [None] * kernel.raw_stages if kernel.converts else None

    def _queue(self, num_ctas):
        queue = object.__new__(self.modules["queue"].TileQueue)
        readers = self.config.num_warpgroups + 2 * self.kernel.transposes_v
        queue.num_tiles, queue.in_a_row, queue.forwards, queue.cluster_size = self.schedule.num_tiles, None, False, 1
        queue.index, queue.count, queue.slot = 0, num_ctas, [None]
        queue.counter = object() if self.config.dynamic_tiles else None
        queue.full, queue.empty = (MBarrier(self.machine, n, a) for n, a in (("tile", 1), ("no tile", readers + 1)))
        self.numbers = [0]

        def draw():
            # other thread blocks draw as well
            last = self.numbers[-1] if len(self.numbers) > 1 else num_ctas - 1
            self.numbers.append(last + 1 + self.machine.random.randrange(num_ctas))
            return self.numbers[-1] - num_ctas

        queue._draw = draw
        return queue

    def _barrier(self, number):
        return self.barriers.setdefault(number, NamedBarrier(self.machine, f"barrier {number}"))

    # ---------------------------------------------------------------- roles

    def _produce(self):
        self.producer.run(self.queue, self.schedule, self.seqlens)
        for pipe in (self.loaded.k, self.loaded.v) if not self.kernel.converts else ():
            assert pipe.releases == pipe.fills * pipe.readers, "shared memory is gone while others arrive there"

    def _producer(self):
        kernel = self.kernel
        producer = object.__new__(self.modules["producer"].Producer)
        producer.kernel, producer.pipes, producer.everyone = kernel, self.loaded, None
        producer.notes, producer.descales = self.notes, None
        if kernel.has_descales:
            producer.descales = SimpleNamespace(k={(o, h, 0): (-1.0) ** h for o in range(8) for h in range(8)})
        for name in "qkv":
            halves = 1 if kernel.is_paged and name != "q" else kernel.num_halves
            source = [Source(name, half) for half in range(halves)]
            is_paged = kernel.is_paged and name != "q"
            setattr(producer, f"tma_{name}", name)
            setattr(producer, f"m{name.upper()}", None)
            setattr(producer, f"t{name.upper()}g{name.upper()}", Box(name) if is_paged else source)
            setattr(producer, f"t{name.upper()}s{name.upper()}", Places(getattr(self.loaded, name)))
        if kernel.is_paged:
            producer.boxes = Boxes(kernel.buffer_n // kernel.box_rows)
        return producer

    def _consumer(self, w):
        m, kernel, config = self.modules, self.kernel, self.config
        thread = SimpleNamespace(number=0, lane_in_quad=0, wg=w, row=64 * w)
        rows = m["rows"].Rows(kernel, thread)
        self.cores[w], gemms = TensorCores(), self._gemms()
        self.p[w] = gemms.rP[0]
        softmax = Softmax(self.machine)
        scores = object.__new__(m["scores"].ForwardScores)
        scores.kernel, scores.config, scores.rows, scores.gemms, scores.softmax = kernel, config, rows, gemms, softmax
        scores.scales = Scales(self, w, gemms)
        scores.is_lazy, scores.modifiers = config.rescale_threshold > 0, None
        if self.modifiers is not None:
            scores.modifiers = Modifiers(scores.scales, gemms)
        m["scores"].mask = SimpleNamespace(apply=self._mask)
        for name in ("pack", "pack_halves"):
            setattr(m["scores"], name, pack)
        m["scores"].scaled = SimpleNamespace(pack_p=pack, copy_p=pack)
        output = object.__new__(m["output"].Output)
        output.scales, output.done_max, output.done_sum = SimpleNamespace(softmax=softmax), [None] * 2, [None] * 2
        output.store = lambda tile: self._store(w, tile, gemms, output)
        past = object.__new__(m["past_the_end"].PastTheEnd)
        past.kernel, past.thread, past.pipes = kernel, thread, self.pipes
        past.sV = Fragment(self.pipes.v, self._shares(self.pipes.v))
        for name in ("clear_rows", "clear_keys"):
            setattr(m["past_the_end"], name, clear)
        consumer = object.__new__(m["consumer"].Consumer)
        consumer.kernel, consumer.config, consumer.pipes, consumer.thread = kernel, config, self.pipes, thread
        consumer.pingpong = m["pingpong"].Pingpong(
            config.pingpong and config.num_warpgroups > 1, w, config.num_warpgroups
        )
        self._watch(consumer.pingpong, w)
        consumer.gemms, consumer.scores, consumer.output, consumer.past_the_end = gemms, scores, output, past
        consumer.own_blocks = m["own_blocks"].OwnBlocks(kernel, rows, self.modifiers)
        consumer.loads = m["own_loads"].OwnLoads(None if config.warp_specialized else self.producer)
        m["consumer"].warpgroup = SimpleNamespace(wait_group=lambda most: self._own_cores().wait(most))
        return consumer

    def _watch(self, pingpong, w):
        """Note who has the turn."""
        wait, pass_on = pingpong.wait, pingpong.pass_on

        def wait_and_note():
            wait()
            self.turn = w

        def note_and_pass_on():
            self.turn = None
            pass_on()

        pingpong.wait, pingpong.pass_on = wait_and_note, note_and_pass_on

    def _has_turn(self) -> bool:
        return not self.config.pingpong or self.config.num_warpgroups == 1 or self.turn == self._number()

    def _own_cores(self) -> TensorCores:
        return self.cores[self._number()]

    def _number(self) -> int:
        """The number of the warpgroup that runs now."""
        return int(self.machine.current.name.split()[1])

    def _shares(self, pipe):
        """Buffers of an operand: a float16 half has its own, while boxes and warps' shares make up a tile."""
        return pipe.parts // self.kernel.num_halves

    def _gemms(self):
        kernel, config, module = self.kernel, self.config, self.modules["gemms"]
        gemms = object.__new__(module.ForwardGemms)
        gemms.kernel, gemms.config, gemms.mmas = kernel, config, SimpleNamespace(qk="qk", pv="pv")
        pipes = self.pipes
        gemms.rQ, gemms.rK, gemms.rV = (Fragment(p, self._shares(p)) for p in (pipes.q, pipes.k, pipes.v))
        gemms.pv_blocks = kernel.head_dim_v // kernel.pv_columns
        gemms.acc_s = gemms.s = [Scores(f"S{i}") for i in range(config.score_buffers)]
        gemms.acc_pv = gemms.acc_o = gemms.o = Sums("O", gemms.pv_blocks)
        if config.two_level_sums:
            gemms.acc_pv = Scores("P V") if config.overlap_gemm_softmax else gemms.acc_s[0]
        gemms.rP = gemms._p = [P(f"P{i}") for i in range(kernel.num_halves)]
        self.modules["wgmma"].issue_sum = self._issue
        self.modules["wgmma"].block_of_columns = lambda operand, block: operand._replace(columns=block)
        module.add_here = lambda a, b: a + b
        return gemms

    def _issue(self, mma, acc, pairs, accumulate):
        """A group of GEMMs; results of float32 are those of three pairs of halves."""
        halves = [(0, 0)] if self.kernel.num_halves == 1 else [(1, 0), (0, 1), (0, 0)]
        buffers = [b for pair in pairs for o in pair if isinstance(o, Operand) for b in o.buffers]
        if mma == "qk":
            found = [(a.read(), b.read()) for a, b in pairs]
            assert not accumulate
            if self.kernel.num_halves == 2:
                assert [(a.part, b.part) for a, b in found] == halves
            ((q, k),) = {(a.whole(), b.whole()) for a, b in found}
            p = self.p[self._number()]
            assert self._has_turn() or getattr(p.value, "q", None) != q, "S of a step out of turn"
            acc.value = SimpleNamespace(q=q, k=k, stage="raw", is_masked=False, is_dropped=False)
            self._own_cores().issue(buffers, acc)
            return
        found = [(p.value, b.read()) for p, b in pairs]
        if self.kernel.num_halves == 2:
            assert [(pairs[i][0].name, found[i][1].part) for i in range(3)] == [("P1", 0), ("P0", 1), ("P0", 0)]
        p, v = found[-1]
        assert {tag.cleared for _, tag in found} == {v.cleared}, "only one half is zero past the end"
        assert self._has_turn() or not self._own_cores().groups, "P V of a step out of turn"
        term = ()
        if p.stage != "zero":
            assert p.stage == "exponentials"
            term = (Term(p.q, p.k, v, p.is_masked, p.is_dropped),)
        added = Sum(term, getattr(p, "reference", None))
        if accumulate:
            added = [acc.value[0] + added if term else acc.value[0]]
        acc.value = added
        assert all(b.columns == pairs[0][1].columns for _, b in pairs)
        self._own_cores().issue(buffers, acc, list({id(p): p for p, _ in pairs}.values()))

    def _transposer(self, number):
        kernel, module = self.kernel, self.modules["transposer"]
        warp = object.__new__(module.TransposingWarp)
        warp.kernel, warp.raw_pipe, warp.v_pipe = kernel, self.loaded.v, self.pipes.v
        warp.raw_stages, warp.v_stages = kernel.loaded_v_stages, kernel.v_stages
        size = kernel.buffer_n * kernel.head_dim_v

        def transpose(source, target):
            assert source % size == target % size == 0
            (raw,) = self.loaded.v.tile(source // size)
            self.pipes.v.tile(target // size)[number].write(raw.read())

        warp.transposer = SimpleNamespace(source=0, target=0, transpose=transpose)
        return warp

    def _converter(self, number):
        kernel, module = self.kernel, self.modules["converter"]
        warp = object.__new__(module.ConvertingWarp)
        warp.kernel, warp.raw_pipes, warp.pipes, warp.notes = kernel, self.loaded, self.pipes, self.notes

        def converts(name):
            raw_pipe, pipe = (getattr(pipes, name) for pipes in (self.loaded, self.pipes))

            def convert(raw, index, signs):
                found = Operand(raw_pipe.tile(raw)).read()
                expected = None
                if name == "k" and kernel.has_descales:
                    expected = 0x80808080 if found.head % 2 else 0
                assert signs == expected or signs % 2**32 == expected
                pipe.tile(index)[number].write(found)

            return SimpleNamespace(convert=convert)

        warp.k, warp.v = converts("k"), converts("v")
        return warp

    # ---------------------------------------------------------------- scores and results

    def _mask(self, scores, rows, n_start, lane, geometry):
        value = scores.value
        assert value.stage == "modified"
        assert n_start == value.k.block * self.kernel.buffer_n
        w = self._number()
        rows_of_tile = value.q.block // self.config.num_warpgroups * self.kernel.tile_m
        first = rows_of_tile + w * (self.kernel.tile_m // self.config.num_warpgroups)
        assert rows[0] == first, "a mask for other rows"
        value.is_masked = True

    def _store(self, w, tile, gemms, output):
        sums = gemms.o.value
        assert len({s.terms for s in sums}) == 1
        self.stored.setdefault(w, []).append((tile, sums[0], output.done_sum[0], output.done_max[0]))
        gemms.o.value = [Sum((Term(*5 * ("stale",)),), None)] * len(sums)

    def tiles(self) -> list[int]:
        """The numbers of this thread block's tiles."""
        if self.config.dynamic_tiles:
            numbers = self.numbers
        else:
            numbers = [self.modules["queue"].tile_scheduler.tile_number(0, w, self.queue.count) for w in range(99)]
        return [number for number in numbers if number < self.schedule.num_tiles]

    def _check(self):
        kernel, config = self.kernel, self.config
        for pipe in {id(p): p for p in (*vars(self.pipes).values(), *vars(self.loaded).values())}.values():
            if pipe.fills:
                extra = kernel.converts and pipe is self.loaded.k  # the note after the last tile comes without a load
                assert pipe.releases == pipe.fills * pipe.readers or extra, (
                    f"{pipe.name}: buffers that are not released"
                )
        for w in range(config.num_warpgroups):
            assert len(self.stored[w]) == len(self.tiles())
            for number, (_, out, row_sum, reference) in zip(self.tiles(), self.stored[w], strict=True):
                self._check_tile(w, kernel.tile_at(number, self.schedule, self.seqlens), out, row_sum, reference)

    def _check_tile(self, w, tile, out, row_sum, reference):
        kernel, wgs = self.kernel, self.config.num_warpgroups
        rows = range(tile.m_block * kernel.tile_m + w * kernel.tile_m // wgs, 0)
        rows = range(rows.start, min(rows.start + kernel.tile_m // wgs, tile.geometry.seqlen_q))
        keys = [self.keys_of(row, tile) for row in rows]
        q = Tag("q", tile.head, tile.origin_q, tile.m_block * wgs + w)
        head_kv = tile.head // kernel.tile_heads_per_kvhead
        n, origin_v = kernel.buffer_n, tile.origin_k
        if kernel.packs_keys and kernel.loads_keys_last:
            origin_v = (tile.origin_k // V_KEYS + tile.sequence) * V_KEYS
        if not rows:
            return  # computed in vain
        assert out.reference == reference
        assert Counter(term.k.block for term in out.terms) == Counter(k.block for k in row_sum)
        blocks = [term.k.block for term in out.terms]
        assert len(set(blocks)) == len(blocks), "a block that is added twice"
        for term in out.terms:
            block = term.k.block
            assert (term.q, term.k) == (q, Tag("k", head_kv, tile.origin_k, block))
            assert term.v.whole() == Tag("v", head_kv, origin_v, block)
            is_clear = all(low <= block * n and block * n + n <= high for low, high in keys)
            assert term.is_masked or is_clear, "a block with hidden pairs is not masked"
            past = tile.geometry.seqlen_k - block * n
            first_zero = n if term.v.cleared is None else min(term.v.cleared, n)
            assert first_zero == (max(0, min(past, n)) if kernel.has_garbage else n), "V past the end is not zero"
            assert term.is_dropped == self.drops
        every = range(-(-tile.geometry.seqlen_k // n))
        if kernel.is_split:
            every = range(tile.first, min(tile.last, len(every)))
        for block in every:
            is_visible = any(low < block * n + n and block * n < high for low, high in keys if low < high)
            assert not is_visible or block in blocks, "a visible block is left out"

    @property
    def drops(self) -> bool:
        return self.modifiers is not None

    def keys_of(self, row, tile):
        if self.intervals is not None:
            return self.intervals(row, tile.geometry.seqlen_k)
        _, seqlen_k, left, right = tile.geometry
        position = row + seqlen_k - tile.geometry.seqlen_q
        low = 0 if left is None else max(position - left, 0)
        return low, seqlen_k if right is None else min(seqlen_k, position + right + 1)


class Source(NamedTuple):
    tensor: str
    half: int


class Head(NamedTuple):
    source: Source
    head: int
    origin: int

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            return tuple.__getitem__(self, index)
        return Tag(self.source.tensor, self.head, self.origin, index[1], self.source.half)


class Box(NamedTuple):
    tensor: str

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            return tuple.__getitem__(self, index)
        _, box, head, (origin, block, number) = index
        assert box == number
        return Tag(self.tensor, head, origin, block, 0)


class Boxes:
    """`BoxLocations`."""

    def __init__(self, count):
        self.count, self.k_boxes, self.v_boxes = count, None, None

    def look_up(self, origin, block, seqlen_k):
        self.keep()
        self.k_boxes = origin, block

    def keep(self):
        self.v_boxes = self.k_boxes

    def box(self, locations, number):
        return (*locations, number), number


class Places:
    """The target of copies: buffers by their number."""

    def __init__(self, pipe):
        self.pipe = pipe

    def __getitem__(self, index):
        *_, part, number = (0, *index)
        part = part or 0
        if len(index) == 3:  # a box of a stage
            return self.pipe.buffers[number * self.pipe.parts + part]
        return self.pipe.buffers[number]


class Scales:
    """The scales of scores; each method says for which tile it was called."""

    def __init__(self, forward, w, gemms):
        self.forward, self.w, self.gemms, self.loaded = forward, w, gemms, None

    def load(self, tile):
        self.loaded = tile

    def apply(self, acc_s, tile, n_block, begins):
        value, kernel = acc_s.value, self.forward.kernel
        assert value.stage == "raw"
        buffer = self.gemms.acc_s.index(acc_s)
        assert value.k.block == n_block * kernel.score_buffers + buffer, "scores of another block"
        assert (value.k.origin, value.q.head) == (tile.origin_k, tile.head)
        if self.forward.config.score_buffers == 1:
            assert self.loaded is not None
            assert (self.loaded.head, self.loaded.m_block, self.loaded.origin_q) == (
                tile.head,
                tile.m_block,
                tile.origin_q,
            )
            assert begins == (n_block == tile.last - 1)
        acc_s.take("raw", "modified")


class Modifiers:
    """`TileModifiers` with intervals and dropout."""

    def __init__(self, scales, gemms):
        self.scales, self.gemms = scales, gemms

    def load(self, tile):
        pass

    def add_terms(self, tile, n_block, buffer):
        pass

    def hide(self, tile, n_block, buffer):
        value = self.gemms.s[buffer].value
        assert (value.stage, value.k.block, value.q.head) == ("modified", n_block, tile.head)
        value.is_masked = True

    def drop(self, tile, n_block, buffer):
        value = self.gemms.s[buffer].value
        assert (value.stage, value.k.block, value.q.head) == ("exponentials", n_block, tile.head)
        assert not value.is_dropped
        value.is_dropped = True

    def drop_packed(self, rP):
        pass


class Intervals:
    """`blocks.softmax.modifiers.Modifiers` of queries that see the keys of a function."""

    def __init__(self, forward):
        self.forward = forward

    def key_blocks(self, rows, seqlen_k, tile_n):
        keys = [self.forward.intervals(query, seqlen_k) for place, query in rows if query < place.seqlen_q]
        keys = [(low, high) if low < high else (seqlen_k, 0) for low, high in keys] or [(seqlen_k, 0)]
        low, high = min(k[0] for k in keys), max(k[1] for k in keys)
        first = min(low, max(seqlen_k - 1, 0)) // tile_n
        last = max(-(-high // tile_n), first + 1)
        clear_last = max(min(min(k[1] for k in keys) // tile_n, last), first)
        clear_first = max(min(-(-max(k[0] for k in keys) // tile_n), clear_last), first)
        return KeyBlocks(first, clear_first, clear_last, last)


def pack(scores, *targets):
    assert scores.value.stage == "exponentials"
    for target in targets:
        target.value = scores.value


def clear(tile, first, thread, num_threads):
    for buffer in tile.buffers:
        buffer.content = buffer.read()._replace(cleared=max(first, 0))
