"""Rows of a step on their way: to the ranks that compute with them, and results back to the ranks that own them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import copies
from .exchange import Expected, Message, Pending, exchange, words
from .plan import ContextPlan
from .routes import Route, Selection, add, put, take
from .schedule import AHEAD, Step

# ---------------------------------------------------------------- rows to where they are needed


class Shipment(NamedTuple):
    """Rows of this rank that other ranks need, and rows of other ranks that this one needs. Nothing is sent yet.

    Attributes:
        own: this rank's rows of the heads that it computes.
        route: how the rows that this rank computes with come to it; None: they are its own.
        sends: the messages to other ranks.
        published: the rows of each rank, of the heads that this rank computes, if rows are read and not sent.
    """

    own: Tensor
    route: Route | None = None
    sends: Sequence[Message] = ()
    published: Sequence[Tensor] | None = None

    @property
    def travels(self) -> bool:
        """Whether any rank sends anything."""
        return self.route is not None and self.route.travels

    def expected(self, rank: int) -> list[Expected]:
        """The tensors that other ranks send. Args: rank: this rank."""
        rest, dtype = tuple(self.own.shape[1:]), self.own.dtype
        incoming = self.route.incoming if self.route is not None else ()
        return [Expected(rows.source, (rows.size, *rest), dtype) for rows in incoming if rows.source != rank]

    def buffer(self) -> Tensor:
        """Room for the rows that this rank computes with."""
        assert self.route is not None
        return self.own.new_empty((sum(rows.size for rows in self.route.incoming), *self.own.shape[1:]))

    def rows(self, rank: int, received: Iterator[Tensor]) -> Tensor:
        """The rows that this rank computes with. Args: received: its next tensors are those of `expected`."""
        if self.route is None or self.route.is_own(rank, self.own.shape[0]):
            return self.own
        buffer = self.buffer()
        for rows in self.route.incoming:
            put(buffer, rows.rows, take(self.own, rows.source_rows) if rows.source == rank else next(received))
        return buffer


class Coming:
    """Rows that are on their way. The messages of all shipments are one operation of the process group."""

    def __init__(self, plan: ContextPlan, shipments: Sequence[Shipment]):
        self._rank, self._shipments = plan.rank, shipments
        self._pending = Pending()
        if any(shipment.travels for shipment in shipments):
            sends = [message for shipment in shipments for message in shipment.sends]
            receives = [expected for shipment in shipments for expected in shipment.expected(plan.rank)]
            self._pending = exchange(plan.group, sends, receives, shipments[0].own.device)

    def wait(self) -> list[Tensor]:
        """The rows of each shipment."""
        received = iter(self._pending.wait())
        return [shipment.rows(self._rank, received) for shipment in self._shipments]


class Reading:
    """Rows that copy engines read from other ranks."""

    def __init__(self, rank: int, reader: copies.Copies, shipments: Sequence[Shipment]):
        self._rows: list[Tensor] = []
        pairs: list[tuple[Tensor, Tensor]] = []
        for shipment in shipments:
            route = shipment.route
            if shipment.published is None or route is None or route.is_own(rank, shipment.own.shape[0]):
                self._rows.append(shipment.own)
                continue
            buffer = shipment.buffer()
            self._rows.append(buffer)
            for piece in route.pieces:
                rows = shipment.published[piece.source][piece.source_row : piece.source_row + piece.rows]
                pairs.append((buffer[piece.row : piece.row + piece.rows], rows))
        self._wait = reader.read(pairs)

    def wait(self) -> list[Tensor]:
        """The rows of each shipment."""
        self._wait()
        return self._rows


class Arrivals:
    """The buffers of one step after the other; those of `AHEAD` steps are being filled at a time.

    Args: inputs_of: the shipments that a step needs, by its number. reader: reads rows; None: they are sent.
    """

    def __init__(
        self,
        plan: ContextPlan,
        inputs_of: Callable[[int], list[Shipment]],
        reader: copies.Copies | None = None,
    ):
        self._plan, self._inputs_of, self._reader = plan, inputs_of, reader
        self._coming: deque[Coming | Reading] = deque()
        self._left = iter(range(len(plan.schedule.steps)))
        for _ in range(AHEAD):
            self.start_next()

    def start_next(self) -> None:
        """Start the messages of one more step, if there is one. By now the caller has let go of the step before."""
        index = next(self._left, None)
        if index is not None:
            shipments = self._inputs_of(index)
            reader = self._reader
            plan = self._plan
            self._coming.append(Coming(plan, shipments) if reader is None else Reading(plan.rank, reader, shipments))

    def wait(self) -> list[Tensor]:
        """The next step's buffers, filled."""
        return self._coming.popleft().wait()


def send_queries(plan: ContextPlan, step: Step, rows: Tensor, published: Sequence[Tensor] | None = None) -> Shipment:
    """Rows (rows, batch, heads, dim) of all heads, for the ranks that compute with them: each gets its own heads.

    Args: published: the published rows of all ranks, if rows are read and not sent.
    """
    if step.width == 1:
        return Shipment(rows[:, :, plan.schedule.heads_q(step, plan.rank)])
    return _ship(
        plan, plan.query_route(step, rows.device), rows, lambda rank: plan.schedule.heads_q(step, rank), published
    )


def send_keys(plan: ContextPlan, step: Step, rows: Tensor, published: Sequence[Tensor] | None = None) -> Shipment:
    """Rows of k or v, for the ranks whose queries see them. Args: as for `send_queries`."""
    return _ship(
        plan, plan.key_route(step, rows.device), rows, lambda rank: plan.schedule.heads_kv(step, rank), published
    )


def _ship(
    plan: ContextPlan,
    route: Route,
    rows: Tensor,
    heads_of: Callable[[int], slice],
    published: Sequence[Tensor] | None,
) -> Shipment:
    own = rows[:, :, heads_of(plan.rank)]
    if published is not None:
        return Shipment(own, route, published=[t[:, :, heads_of(plan.rank)] for t in published])
    sends = [
        message(rank, rows[:, :, heads_of(rank)], of_rank.source_rows)
        for rank, outgoing in route.outgoing
        for of_rank in outgoing
        if rank != plan.rank
    ]
    return Shipment(own, route, sends)


def message(rank: int, t: Tensor, rows: Selection) -> Message:
    """A message of some rows of a tensor."""
    return Message(rank, t[rows]) if isinstance(rows, slice) else Message(rank, t, rows)


# ---------------------------------------------------------------- results to where they belong


class Return:
    """Results of a step, (rows, batch, heads, ...), on the way to the ranks that own their rows.

    Args:
        route: the route by which the rows of the step came.
        heads_of: rank -> the heads of its results.
    """

    def __init__(self, plan: ContextPlan, route: Route, results: Sequence[Tensor], heads_of: Callable[[int], slice]):
        self.plan, self.route, self.heads_of = plan, route, heads_of
        self.sends = [
            message(rows.source, result, rows.rows)
            for result in map(words, results)
            for rows in route.incoming
            if rows.source != plan.rank
        ]
        self.receives: list[Expected] = []
        self.own_rows = [rows for rank, outgoing in route.outgoing if rank == plan.rank for rows in outgoing]
        self.own = [[take(result, rows.rows) for rows in self.own_rows] for result in results]
        for result in results:
            for rank, outgoing in route.outgoing:
                heads = heads_of(rank)
                shape = result.shape[1], heads.stop - heads.start, *result.shape[3:]
                if rank != plan.rank:
                    self.receives += [Expected(rank, (rows.size, *shape), result.dtype) for rows in outgoing]

    def arrived(self, received: Iterator[Tensor]) -> Iterator[tuple[int, Selection, slice, Tensor]]:
        """For each result, in the order of the ranks: its number, rows of this rank's tensors, heads, and values.

        Args: received: its next tensors are those that have arrived for these results.
        """
        for number, own_values in enumerate(self.own):
            own = iter(own_values)
            for rank, outgoing in self.route.outgoing:
                for rows in outgoing:
                    if rank != self.plan.rank:
                        yield number, rows.source_rows, self.heads_of(rank), next(received)
                    elif own_values:  # own results that have not been written yet
                        yield number, rows.source_rows, self.heads_of(rank), next(own)


class QueryReturn(Return):
    """Results of a step's queries."""

    def __init__(self, plan: ContextPlan, step: Step, results: Sequence[Tensor], device: torch.device):
        results = [words(t) if t.dim() == 4 else t for t in results]  # lse has no head_dim
        super().__init__(plan, plan.query_route(step, device), results, lambda rank: plan.schedule.heads_q(step, rank))

    def write_own(self, targets: Sequence[Tensor]) -> None:
        """Write this rank's own results into tensors of all heads, and release the results of the step."""
        heads = self.heads_of(self.plan.rank)
        for target, own in zip(targets, self.own, strict=True):
            for rows, values in zip(self.own_rows, own, strict=True):
                put(target[:, :, heads], rows.source_rows, values)
        self.own, self.sends = [[] for _ in self.own], []

    def write(self, targets: Sequence[Tensor], received: Iterator[Tensor]) -> None:
        """Write what other ranks have sent."""
        for number, rows, heads, values in self.arrived(received):
            put(targets[number][:, :, heads], rows, values)


class KeyReturn(Return):
    """Gradients of a step's keys, and of its values."""

    def __init__(self, plan: ContextPlan, step: Step, gradients: Sequence[Tensor], device: torch.device):
        self.step = step
        super().__init__(plan, plan.key_route(step, device), gradients, lambda rank: plan.schedule.heads_kv(step, rank))

    def keep_own(self) -> None:
        """Release the step's results, which have been packed for other ranks; keep copies of this rank's own rows."""
        if self.sends:
            self.sends = []
            is_view = [isinstance(rows.rows, slice) for rows in self.own_rows]
            self.own = [[t.clone() if view else t for t, view in zip(own, is_view, strict=True)] for own in self.own]

    def own_sums(self, num_rows: int, heads: slice) -> list[Tensor] | None:
        """This rank's own results as sums to which others are added.

        Args: num_rows: the number of the rank's rows.
        Returns: None unless the results have all of its rows and these heads.
        """
        has_all = sum(rows.size for rows in self.own_rows) == num_rows > 0
        if not has_all or heads != self.heads_of(self.plan.rank):
            return None
        found = []
        for own in self.own:
            if len(own) == 1 and isinstance(self.own_rows[0].source_rows, slice):
                found.append(own[0])
                continue
            found.append(own[0].new_empty((num_rows, *own[0].shape[1:])))
            for rows, values in zip(self.own_rows, own, strict=True):
                put(found[-1], rows.source_rows, values)
        self.own = [[] for _ in self.own]
        return found

    def write_to(self, targets: Sequence[Tensor], received: Iterator[Tensor]) -> None:
        """Write the gradients into words of all kv heads, where each of them comes from one rank."""
        for number, rows, heads, values in self.arrived(received):
            put(targets[number][:, :, heads], rows, words(values))

    def add_to(self, targets: Sequence[Tensor], first_head: int, received: Iterator[Tensor]) -> None:
        """Add the gradients to targets, in the order of the ranks, so that sums do not change from run to run.

        Args: targets: (rows, batch, heads, dim) of this rank's keys and values, for kv heads from first_head on.
        """
        for number, rows, heads, values in self.arrived(received):
            own_heads = slice(heads.start - first_head, heads.stop - first_head)
            add(targets[number][:, :, own_heads], rows, values)


def start(plan: ContextPlan, device: torch.device, *returns: Return) -> Pending:
    """Send the messages of results in one operation of the process group, if any rank has some."""
    pending = Pending()
    if any(returned.route.travels for returned in returns):
        sends = [message for returned in returns for message in returned.sends]
        receives = [expected for returned in returns for expected in returned.receives]
        pending = exchange(plan.group, sends, receives, device)
    return pending


class KeyGradients:
    """dk and dv of this rank's keys, from what the steps send.

    Where the gradient of a key is no sum, it is written as it comes. Otherwise a kv head whose query heads are all in
    one step is rounded when the gradients of that step have arrived, so that memory holds float32 sums of few heads.
    Where a kv head is divided among steps, the sums of all heads stay until the last step.

    Args: dtype: the dtype of the sums.
    """

    def __init__(self, plan: ContextPlan, dk: Tensor, dv: Tensor, dtype: torch.dtype):
        self.plan, self.gradients, self.dtype = plan, (dk, dv), dtype
        self.words = words(dk), words(dv)
        self.are_sums = plan.schedule.sums_keys()
        self.steps_left = len(plan.schedule.steps)
        self.whole: list[Tensor] | None = None
        if any(step.heads % plan.schedule.qhead_per_kvhead for step in plan.schedule.steps):
            self.whole = self._zeros(dk.shape[2])

    def add(self, returned: KeyReturn, received: Iterator[Tensor]) -> None:
        """Add a step's gradients. Args: received: its next tensors are those that have arrived."""
        self.steps_left -= 1
        if self.whole is not None:
            returned.add_to(self.whole, 0, received)
            if self.steps_left == 0:
                self._round(self.whole, slice(None))
            return
        if not self.are_sums:
            returned.write_to(self.words, received)
            return
        heads = self.plan.schedule.heads_kv_of_row(returned.step)
        sums = returned.own_sums(self.gradients[0].shape[0], heads) or self._zeros(heads.stop - heads.start)
        returned.add_to(sums, heads.start, received)
        self._round(sums, heads)

    def _zeros(self, heads: int) -> list[Tensor]:
        return [t.new_zeros((*t.shape[:2], heads, t.shape[-1]), dtype=self.dtype) for t in self.gradients]

    def _round(self, sums: Sequence[Tensor], heads: slice) -> None:
        for gradient, total in zip(self.gradients, sums, strict=True):
            gradient[:, :, heads] = total
