"""The roles of the Hopper backward on the CPU (support/roles.py): which products reach which dK, dV and dQ.

A value is the number of the block of queries that it was made of. A finished tile has each query block that it visits
once in dK, dV and the additions to dQ.
"""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import NamedTuple

from forward_roles import WG_THREADS, Head, Source
from roles import Buffer, Machine, MBarrier, NamedBarrier, Pipe, Register, TensorCores, as_python, language, link

from onepass.geometry.tile_scheduler import Divisors


class Barriers(list):
    """An array of barriers."""

    def __add__(self, number):
        return self[number]


class Part(NamedTuple):
    """The target of copies: one of the buffers that a stage has.

    Args: part: its number; None: the index is that of a part, of a pipe with one stage.
    """

    pipe: Pipe
    part: int | None

    def __getitem__(self, index):
        if not isinstance(index, tuple):
            return tuple.__getitem__(self, index)
        number = index[-1]
        return self.pipe.buffers[number] if self.part is None else self.pipe.tile(number)[self.part]


class Stats:
    """-lse and -delta of a block of rows by its number."""

    def __getitem__(self, index):
        return "stats", index[0]


class Sum(Register):
    """Attributes: value: the blocks that have been added."""

    def fill(self, zero):
        assert zero == 0.0
        self.value = ()

    def add(self, value):
        self._value += (value,)


class Backward:
    """A thread block with one consumer for each warpgroup."""

    def __init__(self, problem, config, seed: int, num_ctas: int = 1):
        import cutlass

        machine = self.machine = Machine(seed)
        self.problem, self.config = problem, config
        self.barriers: dict[int, NamedBarrier] = {}
        stand_ins = language(
            machine,
            barrier=lambda barrier_id, number_of_threads: self._barrier(barrier_id).sync(number_of_threads, WG_THREADS),
            barrier_arrive=lambda barrier_id, number_of_threads: self._barrier(barrier_id).arrive(
                number_of_threads, WG_THREADS
            ),
            grid_dim=lambda: (num_ctas, 1, 1),
        )
        stand_ins["order_after_words"] = lambda words: None
        begin = machine.copy

        def copy(source, target, barrier):
            if self.kernel.has_background_rows and source[0] == "q":
                assert (source.origin, source.head // self.kernel.group) in self.prepared, "rows are not prepared"
            begin(source, target, barrier)

        machine.copy = copy
        names = "kernel", "consumer", "wide", "producer", "exchange"
        self.modules = {name: as_python(f"sm90.backward.{name}", stand_ins) for name in names}
        self.modules["tiles"] = as_python("blocks.tiles.key_tiles", stand_ins)
        self.modules["turns"] = as_python("blocks.tiles.pingpong", stand_ins)
        self.modules["queue"] = as_python("blocks.tiles.queue", stand_ins)
        link(list(self.modules.values()))
        kernel = self.kernel = self.modules["kernel"].BackwardSm90(problem, config, cutlass.BFloat16)
        kernel.at_head = lambda t, m, head, origin: Head(t, head, origin)
        tiles = -(-problem.seqlen_k // kernel.tile_n)
        self.schedule = SimpleNamespace(
            num_tiles=tiles * problem.num_heads_kv * problem.batch,
            num_m_blocks=tiles,
            batch=problem.batch,
            divisors=Divisors(tiles, 1, 1, problem.num_heads_kv),
        )
        self.seqlens = SimpleNamespace(
            seqlen_q=problem.seqlen_q,
            seqlen_k=problem.seqlen_k,
            window_left=problem.mask.window_left,
            window_right=problem.mask.window_right,
            lengths=SimpleNamespace(seqused_k=None),
        )
        blocks = -(-problem.seqlen_q // kernel.tile_m)
        self.accumulator = SimpleNamespace(stats=Stats(), num_heads=problem.num_heads_q, blocks_per_head=blocks)
        wgs = config.num_warpgroups
        self.pipes = SimpleNamespace(
            k=Pipe(machine, "K", 1, wgs, kernel.key_tiles),
            v=Pipe(machine, "V", 1, wgs, kernel.key_tiles),
            q=Pipe(machine, "Q", config.q_stages, wgs, 2),
            do=Pipe(machine, "dO", config.do_stages, wgs),
        )
        self.ds = [Buffer(f"dS{i}") for i in range(2 * kernel.key_tiles)]
        self.ds_full, self.p_full = (
            Barriers(MBarrier(machine, f"{name}{i}", count) for i in range(2))
            for name, count in (("dS", kernel.key_tiles), ("P", 1))
        )
        self.queue = self._queue(num_ctas)
        self.cores = {w: TensorCores() for w in range(wgs)}
        self.prepared: set = set()
        self.results: dict = {}

    def _barrier(self, number):
        return self.barriers.setdefault(number, NamedBarrier(self.machine, f"barrier {number}"))

    def _queue(self, num_ctas):
        queue = object.__new__(self.modules["queue"].TileQueue)
        queue.num_tiles, queue.in_a_row, queue.forwards, queue.cluster_size = self.schedule.num_tiles, None, False, 1
        queue.index, queue.count, queue.slot = 0, num_ctas, [None]
        queue.counter = object() if self.config.dynamic_tiles else None
        arrivals = ("tile", 1), ("no tile", self.config.num_warpgroups + 1)
        queue.full, queue.empty = (MBarrier(self.machine, *pair) for pair in arrivals)
        draws = iter(range(0, 10**6, num_ctas))
        queue._draw = lambda: next(draws)
        return queue

    def run(self):
        consumers = {w: self._consumer(w) for w in range(self.config.num_warpgroups)}
        roles = {
            f"consumer {w}": lambda c=c: c.run(self.queue, self.schedule, self.seqlens, None)
            for w, c in consumers.items()
        }
        roles["producer"] = self._produce
        if self.config.dynamic_tiles:
            roles["scheduler"] = self.queue.fill
        self.machine.run(roles)
        for pipe in vars(self.pipes).values():
            assert pipe.releases == pipe.fills * pipe.readers, f"{pipe.name}: buffers that are not released"
        self._check()

    def _produce(self):
        producer = object.__new__(self.modules["producer"].BackwardProducer)
        producer.kernel, producer.accumulator, producer.pipes = self.kernel, self.accumulator, self.pipes
        producer.sStats, producer.rank, producer.everyone, producer.peer_k = Part(self.pipes.q, 1), 0, None, None
        producer.background = None
        if self.kernel.has_background_rows:
            producer.background = SimpleNamespace(wait_for_rows=lambda *head: self.prepared.add(head))
        for name in ("k", "v", "q", "do"):
            target = Part(getattr(self.pipes, name), None if name in ("k", "v") else 0)
            setattr(producer, name, (name, None, Source(name, 0), target))
        self.modules["producer"].cpasync = SimpleNamespace(CopyBulkG2SOp=lambda: None)
        producer.run(self.queue, self.schedule, self.seqlens)
        for pipe in vars(self.pipes).values():
            assert pipe.releases == pipe.fills * pipe.readers, "shared memory is gone while others arrive there"

    def _consumer(self, w):
        kernel, config = self.kernel, self.config
        is_wide = config.by_gradient
        module = self.modules["wide" if is_wide else "consumer"]
        consumer = object.__new__(module.WideConsumer if is_wide else module.BackwardConsumer)
        thread = SimpleNamespace(number=0, wg=w)
        consumer.kernel, consumer.pipes, consumer.thread = kernel, self.pipes, thread
        consumer.gemms = Gemms(self, w)
        consumer.scores = Scores(self, w)
        exchange = object.__new__(module.WideExchange if is_wide else self.modules["exchange"].Exchange)
        exchange.kernel, exchange.thread, exchange.tile, exchange.sdS = kernel, thread, 0 if is_wide else w, None
        exchange.ds_full, exchange.p_full, exchange.copies_of_p = self.ds_full, self.p_full, list
        exchange.write = lambda operand, tile: self.ds[tile].write(operand.value)
        self.modules["wide"].cute.make_rmem_tensor = lambda *_: None
        self.modules["wide"].P_WORDS = 4
        consumer.exchange = exchange
        turns = SimpleNamespace(take=lambda: None, give=lambda: None)
        consumer.sums = SimpleNamespace(
            turns=turns,
            accumulator=self.accumulator,
            add=lambda acc, tile, head, m_block: self._add(w, acc, tile, head, m_block),
            add_share=lambda acc, share: self.results[w]["pieces"].append((share, acc.value)),
            share_of_piece=lambda number, piece: (number, piece),
            end_tile=lambda tile_end: None,
            repair=lambda tile: None,
        )
        consumer.past_the_end = SimpleNamespace(clear_keys=lambda *_: None, clear_queries=lambda *_: None)
        consumer.keys = consumer.values = None
        if is_wide:
            store = lambda tile, acc: self._store(w, tile, consumer)  # noqa: E731
            consumer.gradients = SimpleNamespace(store_dv=store, store_dk=store)
        else:
            turns_are_taken = config.pingpong
            consumer.turns = self.modules["turns"].Turns(turns_are_taken, w, config.num_warpgroups)
            consumer.overlaps, consumer.delta_in_dp = config.overlap_gradients, self.problem.softcap is not None
            consumer.store = lambda tile, ds_count: self._store(w, tile, consumer)
        waiting = SimpleNamespace(wait_group=lambda most: self.own_cores().wait(most))
        self.modules["consumer"].warpgroup = self.modules["wide"].warpgroup = waiting
        self.results[w] = {"tiles": [], "dq": [], "pieces": []}
        return consumer

    def own_cores(self) -> TensorCores:
        return self.cores[int(self.machine.current.name.split()[1])]

    def _add(self, w, acc, tile, head, m_block):
        assert acc.value == (head, m_block), "dQ of another block"
        self.results[w]["dq"].append((head, m_block))

    def _store(self, w, tile, consumer):
        found, seen = self.results[w], consumer.gemms.seen
        assert seen == ({(tile.n_block, tile.head_kv, tile.origin_k)} if tile.last > tile.first else set())
        seen.clear()
        found["tiles"].append((tile, consumer.gemms.acc_dk.value, consumer.gemms.acc_dv.value, found["dq"]))
        found["dq"] = []

    def _check(self):
        kernel, queue = self.kernel, self.queue
        numbers = [n * queue.count for n in range(99)]
        if not self.config.dynamic_tiles:
            numbers = [self.modules["queue"].tile_scheduler.tile_number(0, w, queue.count) for w in range(99)]
        tiles = [kernel.tile_at(n, self.schedule, self.seqlens) for n in numbers if n < self.schedule.num_tiles]
        for w, found in self.results.items():
            assert [tile for tile, *_ in found["tiles"]] == tiles
            for tile, dk, dv, dq in found["tiles"]:
                heads = range(tile.head_kv * kernel.group, (tile.head_kv + 1) * kernel.group)
                visits = Counter((head, m_block) for head in heads for m_block in range(tile.first, tile.last))
                if not self.config.by_gradient:
                    assert Counter(dk) == Counter(dv) == Counter(dq) == visits
                else:
                    assert Counter(dv if w == 0 else dk) == visits
        if self.config.by_gradient:
            expected: Counter = Counter()
            for tile in tiles:
                for head in range(tile.head_kv * kernel.group, (tile.head_kv + 1) * kernel.group):
                    for m_block in range(tile.first, tile.last):
                        number = kernel.m_block_number(self.accumulator, tile, head, m_block)
                        expected.update((number, piece, head, m_block) for piece in range(kernel.num_pieces))
            pieces = Counter((*share, *value) for w in self.results for share, value in self.results[w]["pieces"])
            assert pieces == expected


class Gemms:
    """The five GEMMs of a warpgroup. Values are (head, number) of blocks of queries."""

    def __init__(self, backward, w):
        self.backward, self.w, self.pipes = backward, w, backward.pipes
        self.acc_dk, self.acc_dv = Sum("dK"), Sum("dV")
        self.keys = range(backward.kernel.key_tiles)
        self.seen: set = set()  # the tiles whose keys have been read
        self.own = 0 if backward.config.by_gradient else w

    def load_keys(self):
        self._keys(self.pipes.k, [self.own])

    def _keys(self, pipe, tiles) -> list:
        """The buffers of the tile's keys, which have arrived."""
        buffers = [pipe.buffers[i] for i in tiles]
        for i, buffer in zip(tiles, buffers, strict=True):
            tag = buffer.read()
            assert (tag.tensor, tag.block % len(self.keys)) == (pipe.name.lower(), i), "keys of another place"
            self.seen.add((tag.block // len(self.keys), tag.head, tag.origin))
        return buffers

    def _queries(self, pipe, state):
        buffer = pipe.tile(state.index)[0]
        tag = buffer.read()
        return buffer, (tag.head, tag.block)

    def _issue(self, *arguments):
        self.backward.own_cores().issue(*arguments)

    def issue_s(self, q_state):
        return self._new("S", *self._queries(self.pipes.q, q_state), self.pipes.k)

    def issue_dp(self, do_state, minus_delta=None):
        acc = self._new("dP", *self._queries(self.pipes.do, do_state), self.pipes.v)
        acc.delta = minus_delta
        return acc

    def _new(self, name, buffer, value, pipe):
        acc = Register(name)
        acc.value = value
        self._issue([buffer, *self._keys(pipe, [self.own])], acc)
        return acc

    def issue_dv(self, rP, do_state, before_last=None):
        self._add(self.acc_dv, rP, *self._queries(self.pipes.do, do_state), before_last)

    def issue_dk(self, rdS, q_state, before_last=None):
        self._add(self.acc_dk, rdS, *self._queries(self.pipes.q, q_state), before_last)

    def _add(self, acc, operand, buffer, value, before_last):
        assert operand.value == value, "factors of two blocks"
        if before_last is not None:
            before_last()
        acc.add(value)
        self._issue([buffer], acc, [operand])

    def issue_dq(self, count, piece=0):
        tiles = self.keys
        buffers = [self.backward.ds[count % 2 * len(tiles) + w] for w in tiles]
        (value,) = {buffer.read() for buffer in buffers}
        acc = Register("dQ")
        acc.value = value
        self._issue(buffers + self._keys(self.pipes.k, tiles), acc)
        return acc


class Scores:
    """P and dS. Their values are the blocks of the GEMMs, which have to be those that the methods are told."""

    def __init__(self, backward, w):
        self.backward, self.w = backward, w
        self.rP, self.rdS = Register("P"), Register("dS")
        self.rP_of_dv, self.p, self.flags = self.rP, None, None
        self.lse = self.minus_delta = None
        self.read: list = [None, None]

    def _stats(self, q_state):
        return self.backward.pipes.q.tile(q_state.index)[1].read()

    def _is_of(self, stats, tile, head, m_block):
        number = self.backward.kernel.m_block_number(self.backward.accumulator, tile, head, m_block)
        assert stats == ("stats", number), "statistics of other rows"

    def load_slope(self, tile, head):
        pass

    def read_lse(self, q_state):
        self.lse = self._stats(q_state)

    def read_delta(self, q_state, first=0, end=128):
        self.minus_delta = self._stats(q_state)
        self.read[0 if first < 64 else 1] = self.minus_delta
        self.read[0 if end <= 64 else 1] = self.minus_delta

    def draw_flags(self, tile, head, m_block):
        self.flags = head, m_block

    draw_kept = draw_flags

    def make_p(self, acc_s, tile, head, m_block):
        assert self.backward.config.by_gradient or self.flags == (head, m_block)
        self.exponentials(acc_s, tile, head, m_block)
        self.take_p(acc_s, tile, head, m_block)

    def exponentials(self, acc_s, tile, head, m_block):
        assert acc_s.value == (head, m_block), "scores of another block"
        self._is_of(self.lse, tile, head, m_block)

    def take_p(self, acc_s, tile, head, m_block):
        self.rP.value = acc_s.value

    def make_ds(self, acc_dp, tile, head, m_block, delta_in_dp=False):
        assert acc_dp.value == (head, m_block), "dP of another block"
        if self.w == 0 or not self.backward.config.by_gradient:
            assert self.rP.value == (head, m_block)
        for stats in [acc_dp.delta] if delta_in_dp else self.read:  # of queries up to 64, and of the others
            self._is_of(stats, tile, head, m_block)
        self.rdS.value = acc_dp.value
