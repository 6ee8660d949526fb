"""The Hopper backward as Python: the kernel's own warps, with symbols for values (hopper_in_python.py).

GEMMs, exponentials and stores check that what they get belongs to the tile and the block of queries that they are for.
In the end each gradient has had its terms once.
"""

import functools
import itertools
import random
from collections import Counter, defaultdict
from types import SimpleNamespace

import kernel_language
import torch
from hopper_in_python import Operand, Registers, Rows, Tensor, Words
from kernel_language import Divisor, Nothing, Slices, device_modules

from onepass.errors import UnsupportedError
from onepass.geometry import tile_scheduler
from onepass.geometry.integers import ceil_div
from onepass.kernels.config import ROWS_PER_WARPGROUP, STAT_ROWS, BackwardConfigSm90
from onepass.kernels.launch import backward_sm90 as launch
from onepass.problem import AttentionProblem, Mask

BITS = SimpleNamespace(width=16)
KEEPER_WARP = 3


# ---------------------------------------------------------------- tensors


class Part:
    """A part of buffers as an operand: its coordinates join the content."""

    def __init__(self, tensor, coordinates):
        self.tensor, self.coordinates = tensor, coordinates

    def __getitem__(self, index):
        *_, number = index
        row, _, fixed = self.coordinates
        if fixed is None:
            return Operand(self.tensor[number,], row)
        return Operand(self.tensor[fixed,], number)


class Turns(Words):
    """Counters, of which each consumer warp has one in a block of rows; lanes of a warp reset all of these."""

    def __init__(self, kernel):
        super().__init__(before=1 * kernel.has_background_rows)
        self.warps = kernel.config.consumer_warps

    def __setitem__(self, index, value):
        for lane in range(self.warps):
            super().__setitem__(index + lane, value)


class Sums(Tensor):
    """The sums of dQ of a block: how many additions had landed when they were read."""

    def __init__(self, kernel, block=None):
        self.kernel, self.block = kernel, block

    def __getitem__(self, index):
        return Sums(self.kernel, index[0])

    @property
    def iterator(self):
        sums, shares = self.kernel.machine.sums, self.kernel.shares
        assert self.kernel.machine.prepared[self.block] == self.kernel.tile_m, "sums that are not cleared yet"
        landed = sum(len(sums.get(self.block * shares + i, ())) for i in range(shares))
        self.kernel.machine.complete.setdefault(self.block, landed)
        return 0


# ---------------------------------------------------------------- what stands for parts of the consumers


class Scores:
    """P and dS, which check what they are made of."""

    def __init__(self, kernel, thread, inputs, buffers, first_key=0, first_warp=0):
        self.kernel, self.accumulator, self.stats, self.first_key = kernel, inputs.accumulator, buffers.stats, first_key
        self.rP, self.rdS = Registers(4), Registers(4)
        self.p, self.rP_of_dv, self.region, self.capped = self.rP, self.rP, self, None
        self.drops, self.minus_delta, self.lse, self.delta = False, None, None, None

    def load_slope(self, tile, head):
        pass

    def prepare(self, *block):
        self.drawn = block

    draw_kept = prepare

    def read_lse(self, q_state):
        self.lse = self.stats[None, q_state.index].content

    def read_delta(self, q_state, first=0, end=128):
        self.delta = self.stats[None, q_state.index].content

    def keys(self, tile, name):
        number = (tile.n_block * self.kernel.tile_n + self.first_key) // ROWS_PER_WARPGROUP
        return name, tile.head_kv, tile.origin_k, number

    def queries(self, tile, head, m_block, name):
        return name, head, tile.origin_q, m_block

    def stats_of(self, tile, head, m_block):
        return "stats", self.kernel.m_block_number(self.accumulator, tile, head, m_block)

    def pair(self, name, tile, head, m_block):
        return name, self.keys(tile, "k"), self.queries(tile, head, m_block, "q")

    def exponentials(self, acc_s, *block):
        assert acc_s.content == ((self.keys(block[0], "k"), self.queries(*block, "q")),)
        assert self.lse == self.stats_of(*block)

    def take_p(self, acc_s, *block):
        self.rP.fill(self.pair("p", *block))

    def make_p(self, acc_s, *block):
        self.exponentials(acc_s, *block)
        self.take_p(acc_s, *block)

    def make_ds(self, acc_dp, tile, head, m_block, delta_in_dp=False):
        block = tile, head, m_block
        assert acc_dp.content == ((self.keys(tile, "v"), self.queries(*block, "do")),)
        assert self.rP.content == self.pair("p", *block)
        assert self.delta == self.stats_of(*block)
        assert self.drawn == block, "flags of dropout for another block"
        self.rdS.fill(self.pair("ds", *block))


class KeyGradients:
    """dK and dV of a tile, which check their terms."""

    def __init__(self, kernel, scores, inputs):
        self.kernel, self.scores = kernel, scores

    def store(self, tile, acc, name, operands, scratch):
        machine, scores = self.kernel.machine, self.scores
        heads = range(tile.head_kv * self.kernel.group, (tile.head_kv + 1) * self.kernel.group)
        blocks = [(tile, *block) for block in itertools.product(heads, range(tile.first, tile.last))]
        terms = {(scores.pair(operands[0], *block), scores.queries(*block, operands[1])) for block in blocks}
        given = acc.content or ()
        assert sorted(given) == sorted(terms)
        if scratch is not None:
            scratch.write(machine.current.warp % 4, "scratch")
        machine.stored[scores.keys(tile, name)] += 1

    def store_dk(self, tile, acc, scratch=None):
        self.store(tile, acc, "dk", ("ds", "q"), scratch)

    def store_dv(self, tile, acc, scratch=None):
        self.store(tile, acc, "dv", ("p", "do"), scratch)


def issue_sum(machine, mma, acc, pairs, accumulate, steps=None, before_last=None):
    """The result of a group of GEMMs is what it was and the contents of its pairs."""
    if before_last is not None:
        before_last()
    operands = [getattr(operand, "buffer", operand) for pair in pairs for operand in pair]
    for operand in operands:
        assert not getattr(operand, "garbage", ()) or mma == "s", "garbage"  # which S masks
    products = tuple(tuple(operand.content for operand in pair) for pair in pairs)
    acc.values[:] = [(acc.values[0] or () if accumulate else ()) + products] * len(acc)
    machine.begin_gemms(acc, operands)


def clear_rows(buffer, end, thread, threads):
    assert isinstance(buffer.content, tuple), "cleared before it has arrived"
    assert not buffer.garbage or end == buffer.end, "cleared from another row on"
    buffer.garbage.discard(thread // 32)


def add_share(sums, acc_dq, share):
    """Add to a warp's share of a block of dQ; the addition lands later."""
    machine, content = sums.kernel.machine, acc_dq[0]
    block = machine.current.block
    block.additions += 1

    def land():
        block.additions -= 1
        machine.sums[share].append(content)

    machine.later(land)
    machine.pause()


VALUES_AT_A_TIME = 2  # so that sums pass in two parts, as those of 128 columns


def put_sums(consumer, sums, first, wg):
    for buffer in range(consumer.kernel.ds_buffers):
        place = consumer.exchange.sdS[None, None, consumer.exchange.ds_tile(buffer)]
        place.write(consumer.thread.warp % 4, ("sums", first, sums[first] or ()))


def add_sums(consumer, sums, first, wg):
    for buffer in range(consumer.kernel.ds_buffers):
        name, part, terms = consumer.exchange.sdS[None, None, consumer.kernel.ds_buffers * wg + buffer].content
        assert (name, part) == ("sums", first)
    for i in range(VALUES_AT_A_TIME):
        sums[first + i] = (sums[first + i] or ()) + terms


def copy_to_peer(machine, target, source, num_bytes, barrier, rank):
    own = machine.current.block
    block, sent = own.cluster.blocks[rank], source[None, None, 0]
    there = target[None, None, 0].at(block)
    content, sent.readers = sent.content, sent.readers + 1
    there.write(0, "a copy on its way")

    def land():
        there.write(0, content)
        barrier.at(block).value.complete(num_bytes)
        sent.readers -= 1

    machine.remotely(block, land)


# ---------------------------------------------------------------- rows in the background


def copy_bulk(machine, scratch, source, num_bytes, barrier):
    assert not any(buffer.readers for buffer in scratch.buffers.values()), "scratch where GEMMs read"
    machine.later(functools.partial(barrier.value.complete, num_bytes))


def load_rows(rows, block, part, scratch, count):
    scratch.barrier.value.arrive(1)
    rows.kernel.machine.later(functools.partial(scratch.barrier.value.complete, 1))


def write_stats(rows, block, first, count, product):
    rows.kernel.machine.prepared[block] += count


def store_box(rows, start, head, entry, row, box):
    number = (entry * rows.accumulator.num_heads + head) * rows.accumulator.blocks_per_head + row // rows.kernel.tile_m
    machine = rows.kernel.machine
    if machine.current.found:
        machine.with_nan.add(number)
        machine.current.found = False
    machine.written[number] += 1


def convert_box(rows, start):
    machine = rows.kernel.machine
    found = machine.random.random() < 0.05
    machine.current.found |= found
    return int(found)


def repair_block(rows, block):
    rows.kernel.machine.repaired.append(block)


# ---------------------------------------------------------------- a launch


@functools.cache
def modules():
    return device_modules("sm90.backward.kernel")


def kernel_class():
    return modules()["sm90.backward.kernel"].BackwardSm90


class Packed:
    """The order of tiles of packed sequences."""

    def __init__(self, kernel, problem, lengths):
        self.tiles, self.batch, start_q, start_k = [], len(lengths), 0, 0
        for sequence, (queries, keys) in enumerate(lengths):
            blocks = ceil_div(keys, kernel.tile_n)
            for number in range(blocks * problem.num_heads_kv):
                coord = tile_scheduler.packed_coord(number, blocks, problem.num_heads_kv, kernel.adds_in_turns)
                self.tiles.append((*coord, start_k, keys, start_q, queries, sequence, None))
            start_q, start_k = start_q + queries, start_k + keys
        self.num_tiles = len(self.tiles)

    def find(self, number):
        return self.tiles[number]


class Launch(kernel_language.Launch):
    """A backward with random sizes.

    Args: fixed: fields of the configuration and of the problem.
    """

    def __init__(self, seed, **fixed):
        self.random = rng = random.Random(seed)
        while True:
            try:
                self.config, self.problem = draw_config(rng, fixed), draw_problem(rng, fixed)
                kernel = kernel_class()(self.problem, self.config, BITS)
                break
            except UnsupportedError:
                continue
        super().__init__(modules(), kernel, seed)
        kernel.problem = self.problem
        has_pieces = self.config.by_gradient or self.config.by_queries
        kernel.shares = 4 * (kernel.num_pieces if has_pieces else kernel.num_warpgroups)  # of a block of dQ
        machine, problem = self.machine, self.problem
        machine.stored, machine.sums, machine.prepared = Counter(), defaultdict(list), Counter()
        machine.written, machine.complete, machine.repaired, machine.with_nan = Counter(), {}, [], set()
        self.lengths = [(problem.seqlen_q, problem.seqlen_k)] * problem.batch
        if problem.is_packed:
            cuts = [
                sorted(rng.choices(range(n + 1), k=problem.batch - 1)) for n in (problem.seqlen_q, problem.seqlen_k)
            ]
            ends = [[0, *cut, n] for cut, n in zip(cuts, (problem.seqlen_q, problem.seqlen_k), strict=True)]
            self.lengths = list(zip(*([b - a for a, b in itertools.pairwise(end)] for end in ends), strict=True))
        self.used = [rng.randint(0, keys) for _, keys in self.lengths] if problem.has_seqused_k else None
        blocks = problem.seqlen_q // self.config.tile_m + problem.batch
        self.blocks_per_head = blocks if problem.is_packed else ceil_div(problem.seqlen_q, self.config.tile_m)
        self.replace_parts()

    def replace_parts(self):
        machine, kernel = self.machine, self.kernel
        super().replace_parts(
            BackwardScores=Scores,
            KeyGradients=KeyGradients,
            clear_rows=clear_rows,
            copy_to_peer=functools.partial(copy_to_peer, machine),
            copy_bulk=functools.partial(copy_bulk, machine),
            VALUES_AT_A_TIME=VALUES_AT_A_TIME,
            row_products=lambda *_: 0.0,
            wgmma=SimpleNamespace(
                issue_sum=functools.partial(issue_sum, machine),
                issue=lambda mma, acc, a, b, *options, **more: issue_sum(machine, mma, acc, [(a, b)], *options, **more),
            ),
        )
        self.modules["sm90.backward.dq_atomic"].AtomicSums.add_share = add_share
        shared = self.modules["sm90.backward.shared_keys"].SharedKeysConsumer
        shared.put, shared.add = put_sums, add_sums
        rows = self.modules["sm90.backward.rows"].BackgroundRows
        rows._load_rows, rows._write_stats, rows._store_box = load_rows, write_stats, store_box
        rows._convert_box, rows._repair_block, rows._staged = convert_box, repair_block, lambda *_: None
        if self.problem.is_packed:
            kernel.schedule_of_keys = lambda *_: Packed(kernel, self.problem, self.lengths)

    def local_tile(self, t, shape, coordinates):
        if isinstance(t, Tensor):
            num_bytes = shape[0] * shape[1] * 2
            return Rows(t.name, num_bytes, self.end_of)
        return Part(t, coordinates)

    def end_of(self, content):
        """The row of a block at which its sequence ends, and memory goes on."""
        name, _, origin, number = content[:4]
        entry = origin
        if self.problem.is_packed:
            starts = itertools.accumulate((pair[name in "kv"] for pair in self.lengths), initial=0)
            entry = max(i for i, start in enumerate(list(starts)[:-1]) if start == origin)
        queries, keys = self.lengths[entry]
        if name in "kv":
            end = keys if self.used is None else min(keys, self.used[entry])
            rows, is_there = ROWS_PER_WARPGROUP, self.kernel.has_garbage
        else:
            end, rows, is_there = queries, self.config.tile_m, self.problem.is_packed
        return end - number * rows if is_there and (number + 1) * rows > end else None

    def are_prepared(self, content):
        """The statistics of a block of rows have been prepared, and have no garbage."""
        assert self.machine.prepared[content[1]] == self.config.tile_m or not self.kernel.has_background_rows

    # ---------------------------------------------------------------- the arguments of the kernel

    def run(self):
        problem, config, kernel, machine, rng = self.problem, self.config, self.kernel, self.machine, self.random
        found = modules()
        heads, batch = (problem.num_heads_kv, 1 if problem.is_packed else problem.batch)
        blocks = None if problem.is_packed else ceil_div(problem.seqlen_k, config.tile_n)
        packed = Packed(kernel, problem, self.lengths) if problem.is_packed else None
        num_tiles = packed.num_tiles if packed else blocks * heads * batch
        num_clusters = rng.randint(1, max(1, min(4, num_tiles)))
        section, ring = rng.randint(1, heads * batch), None
        if kernel.ring_lag:
            ring = launch.tiles_in_ring(problem, config, num_clusters)
            section = launch.heads_per_section(problem, config, num_clusters)
        order = (1, section) if kernel.has_ascending_end else (section,)
        schedule = found["blocks.tiles.schedule"].make_schedule(blocks, heads, batch, *order)
        schedule = schedule._replace(tiles_in_ring=ring)
        lengths = found["blocks.tiles.packed"].Lengths(None, None, self.used)
        stats = Rows("stats", 4 * STAT_ROWS * config.tile_m, self.are_prepared)
        stats.shape = (self.blocks_per_head * problem.num_heads_q * batch,)
        self.turns, self.words = Turns(kernel), Words()
        accumulator = found["blocks.tiles.dq_sums"].Accumulator(
            Sums(kernel), stats, self.turns, self.blocks_per_head, problem.num_heads_q
        )
        q, k, v = (
            Tensor(name, (length, dim, heads, batch))
            for name, length, dim, heads in (
                ("q", problem.seqlen_q, problem.head_dim, problem.num_heads_q),
                ("k", problem.seqlen_k, problem.head_dim, problem.num_heads_kv),
                ("v", problem.seqlen_k, problem.head_dim_v, problem.num_heads_kv),
            )
        )
        rows, module = found["sm90.backward.rows"], found["sm90.backward.kernel"]
        divisors = self.blocks_per_head, self.blocks_per_head * kernel.group, problem.num_heads_q
        loads = (k, v, q, Tensor("do", q.shape), Tensor("k", k.shape))
        tensors = module.Tensors(
            *[None] * 3,
            rows.RowTensors(q, q, None, None, q, None, None, None) if kernel.has_background_rows else None,
            rows.Progress(self.words, Words(self.words.values, 2), heads * batch, *(Divisor(n) for n in divisors)),
            Nothing() if kernel.hides_pairs else None,
            accumulator,
        )
        window = problem.mask.window_left, problem.mask.window_right
        scores = found["blocks.tiles.schedule"].ScoreArguments(1.0, Nothing(), *window, None)
        arguments = (
            module.Loads(*((Nothing(), t) for t in loads)),
            tensors,
            lengths,
            scores,
            schedule,
            self.counter if config.dynamic_tiles else None,
            found["sm90.backward.inputs"].Mmas(*(Slices(name) for name in ("s", "dp", "dv", "dk", "dq"))),
            Nothing(),
        )
        schedule = packed or schedule
        sequences = scores.sequences(problem.seqlen_q, problem.seqlen_k, lengths)
        lanes = {KEEPER_WARP: 2 * config.num_warpgroups} if kernel.adds_in_turns else None
        machine.launch(
            functools.partial(kernel.kernel, *arguments),
            num_clusters * config.tile_blocks,
            config.num_threads // 32,
            config.tile_blocks,
            lanes,
            None if kernel.adds_in_turns else rng.randint(1, num_clusters),
        )
        self.check([kernel.tile_at(number, schedule, sequences) for number in range(schedule.num_tiles)], accumulator)

    # ---------------------------------------------------------------- what is left

    def check(self, tiles, accumulator):
        kernel, machine, config = self.kernel, self.machine, self.config
        parts, shares = config.tile_n // ROWS_PER_WARPGROUP, kernel.shares
        stored, visits = Counter(), defaultdict(list)
        for tile in tiles:
            keys = [(tile.head_kv, tile.origin_k, tile.n_block * parts + i) for i in range(parts)]
            stored.update({(name, *key): 4 for name in ("dk", "dv") for key in keys})
            heads = range(tile.head_kv * kernel.group, (tile.head_kv + 1) * kernel.group)
            for head, m_block in itertools.product(heads, range(tile.first, tile.last)):
                block = head, tile.origin_q, m_block
                turn = kernel.turn_of(tile, m_block) if kernel.adds_in_turns else 0
                number = kernel.m_block_number(accumulator, tile, head, m_block)
                visits[number].append((turn, [("k", *key) for key in keys], ("q", *block)))
        assert machine.stored == stored, "tiles of dk and dv"
        assert len(machine.sums) == len(visits) * shares, "shares of dq"
        for number, of_block in visits.items():
            pieces = Counter()
            for share in range(number * shares, (number + 1) * shares):
                given = [terms_of(content) for content in machine.sums[share]]
                (piece,) = {piece for _, _, piece in given}
                pieces[piece] += 1
                wanted = [(sorted(keys), queries) for _, keys, queries in sorted(of_block)]
                given = [(keys, queries) for keys, queries, _ in given]
                if not kernel.adds_in_turns:
                    wanted, given = sorted(wanted), sorted(given)
                assert given == wanted, "terms of dq"
            assert set(pieces.values()) == {4}, "pieces of dq"
        assert not any(self.counter.values.values()), "the next launch would begin with another number"
        assert not any(self.words.values.values()), "progress that is not zero"
        if kernel.adds_in_turns:
            counted = kernel.num_pieces if kernel.is_paired else kernel.num_warpgroups
            assert sum(self.turns.values.values()) == sum(len(v) for v in visits.values()) * counted
        if kernel.has_background_rows:
            blocks = range(self.blocks_per_head * self.problem.num_heads_q * self.problem.batch)
            assert machine.prepared == dict.fromkeys(blocks, config.tile_m), "rows that are prepared"
            if kernel.finishes_rows:
                pieces = set(machine.written.values())
                assert machine.written == dict.fromkeys(blocks, *pieces), "dq"
                assert machine.complete == {n: len(visits[n]) * shares for n in blocks}, "dq is written too early"
                assert sorted(machine.repaired) == sorted(machine.with_nan if kernel.hides_pairs else ())


def terms_of(products):
    """The keys, the queries and the piece of a share of dQ, from its products."""
    queries = {ds[2] for ds, _ in products}
    pieces = {(*ds[3:], k[4]) for ds, k in products}
    assert all(ds[1] == k[:4] for ds, k in products), products
    (queries,), (piece,) = queries, pieces
    return sorted(k[:4] for _, k in products), queries, piece


def draw_config(rng, fixed):
    def flag():
        return rng.random() < 0.5

    names = "pingpong", "longest_first", "dynamic_tiles", "descending_turns", "overlap_gradients", "heads_together"
    drawn = {name: flag() for name in (*names, "background_rows")}
    stages = ((4, 6), (2, 4)) if fixed.get("by_queries") else ((2, 3), (1, 2))
    drawn |= dict(zip(("q_stages", "do_stages"), map(rng.choice, stages), strict=True))
    drawn["ascending_mib"] = rng.choice((0, 1))
    drawn["ring_lag"] = rng.choice((0, 0, 1, 2))
    drawn |= {name: value for name, value in fixed.items() if name in BackwardConfigSm90.__dataclass_fields__}
    return BackwardConfigSm90(**drawn)


def draw_problem(rng, fixed):
    heads = rng.choice((1, 2))
    sides = rng.choice((None, 0, 100)), rng.choice((None, 0, 100))
    drawn = {"batch": rng.choice((1, 2)), "seqlen_q": rng.randint(1, 260), "seqlen_k": rng.randint(1, 400)}
    drawn |= {"num_heads_kv": heads, "num_heads_q": heads * rng.choice((1, 2)), "mask": Mask(*sides)}
    drawn |= {"deterministic": rng.random() < 0.5, "is_packed": rng.random() < 0.5, "head_dim": 64}
    drawn["has_seqused_k"] = not drawn["is_packed"] and rng.random() < 0.5
    drawn |= {name: value for name, value in fixed.items() if name in AttentionProblem.__dataclass_fields__}
    drawn.setdefault("head_dim_v", drawn["head_dim"])
    return AttentionProblem(dtype=torch.bfloat16, device_type="cuda", softmax_scale=1.0, **drawn)
