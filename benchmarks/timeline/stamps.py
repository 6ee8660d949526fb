"""Time stamps inside the Hopper kernels: roles that note the clock at each of their acts.

The classes here extend the roles of the shipped kernels (producer and consumers of forward and backward) by one
instruction sequence before and after single acts; the kernels themselves know nothing of it. `stamping` puts these
classes in the place of the originals while a kernel is compiled.

A recorded thread, the first one of each role in thread block 0, writes clock64 << 8 | act to global memory. The address
is a constant of the compiled code, and the only state is the place of the next stamp: one register.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from onepass.geometry.integers import select
from onepass.kernels.device.sm90.backward import kernel as backward_kernel
from onepass.kernels.device.sm90.backward.consumer import BackwardConsumer
from onepass.kernels.device.sm90.backward.producer import BackwardProducer
from onepass.kernels.device.sm90.forward import kernel as forward_kernel
from onepass.kernels.device.sm90.forward.consumer import Consumer
from onepass.kernels.device.sm90.forward.producer import Producer

from .acts import ACTS, GLOBAL_TIME, STAMPS_PER_ROLE

WARPGROUP = 128
FIRST_ROLE_OF_CONSUMERS = 1  # role 0 is the producer
_NOT_RECORDED = -1  # looks like the last place of a role, where nothing is written
_ROOM = STAMPS_PER_ROLE - 1  # the last place of a role stays empty


class Stamps:
    """A role that writes stamps. `address` is set while a kernel is compiled."""

    address = 0  # of the stamps in global memory: (roles, STAMPS_PER_ROLE) int64

    def begin_stamps(self, role: Int32 | int, thread: Int32) -> None:
        """Args: role: its number. thread: the number of this thread in its role; thread 0 of block 0 is recorded."""
        self.place = cute.make_rmem_tensor((1,), Int32)
        is_recorded = Boolean(cute.arch.block_idx()[0] == 0) & Boolean(thread == 0)
        self.place[0] = select(is_recorded, Int32(role) * STAMPS_PER_ROLE, Int32(_NOT_RECORDED))
        self.stamp_global_time()

    def stamp(self, act: str) -> None:
        """Note that an act begins; it lasts until the next stamp of this role."""
        self._write(cute.arch.clock64(), ACTS.index(act))

    def stamp_calls(
        self, part: Any, method: str, act: str | None, following: str | None, ends_tile: bool = False
    ) -> None:
        """Note at each call of a part's method that an act begins, and after it that the following one does.

        Args: ends_tile: whether to note the global time as well, between the two.
        """
        call = getattr(part, method)

        def stamped(*arguments, **options):
            if act is not None:
                self.stamp(act)
            result = call(*arguments, **options)
            if ends_tile:
                self.stamp_global_time()
            if following is not None:
                self.stamp(following)
            return result

        setattr(part, method, stamped)

    def stamp_global_time(self) -> None:
        """Note the clock in nanoseconds as well, from which the length of a cycle follows."""
        self._write(cute.arch.clock64(), ACTS.index(GLOBAL_TIME))
        self._write(cute.arch.globaltimer(), ACTS.index(GLOBAL_TIME))

    def _write(self, clock: Int64, number: int) -> None:
        self.place[0] = cute.arch.inline_ptx(
            "{ .reg .pred p; .reg .b32 r, i; .reg .b64 t, a;"
            f" and.b32 r, {{$r0}}, {_ROOM}; setp.ne.u32 p, r, {_ROOM};"
            f" shl.b64 t, {{$r1}}, 8; or.b64 t, t, {number};"
            f" mov.u64 a, {Stamps.address}; mad.wide.u32 a, {{$r0}}, 8, a;"
            " @p st.global.b64 [a], t; selp.b32 i, 1, 0, p; add.s32 {$w0}, {$r0}, i; }",
            write_only_types=[Int32],
            read_only_args=[self.place[0], clock],
        )


# ---------------------------------------------------------------- forward


class StampedProducer(Stamps, Producer):
    """Stamps each load: the wait for an empty buffer, and the copy that is issued then."""

    def __init__(self, *arguments):
        Producer.__init__(self, *arguments)
        # without warp specialization, a thread of a consumer loads
        if self.kernel.config.warp_specialized:
            self.begin_stamps(0, cute.arch.thread_idx()[0])

    def load_q(self, *arguments):
        self._stamped("load Q", Producer.load_q, arguments)

    def load_k(self, *arguments):
        self._stamped("load K", Producer.load_k, arguments)

    def load_v(self, *arguments):
        self._stamped("load V", Producer.load_v, arguments)

    def _stamped(self, act: str, load, arguments):
        if not self.kernel.config.warp_specialized:
            load(self, *arguments)
            return
        self.stamp(act)
        load(self, *arguments)
        self.stamp("other")


class StampedConsumer(Stamps, Consumer):
    """Stamps turns, GEMMs, softmax and stores of 64 rows of queries."""

    def __init__(self, *arguments):
        Consumer.__init__(self, *arguments)
        self.begin_stamps(self.thread.wg + FIRST_ROLE_OF_CONSUMERS, self.thread.number)
        self.stamp_calls(self.pingpong, "wait", "wait for the turn", "issue GEMMs")
        self.stamp_calls(self.pingpong, "pass_on", None, "wait for S")
        self.stamp_calls(self.scores, "modify", "softmax", None)
        if self.config.overlap_gemm_softmax:  # called at the end of each softmax, with dropout or without
            self.stamp_calls(self.scores, "drop", None, "wait for P V")
        self.stamp_calls(self.output, "store", "store", "other", ends_tile=True)

    def issue_qk(self, *arguments):
        self.stamp("issue GEMMs")
        Consumer.issue_qk(self, *arguments)
        self.stamp("wait for S")

    def half_softmax(self, *arguments):
        Consumer.half_softmax(self, *arguments)
        self.stamp("wait for P V")

    def last_pv(self, v_state):
        self.stamp("wait for P V")
        Consumer.last_pv(self, v_state)

    def finish_pv(self, v_state):
        self.stamp("rescale O")
        Consumer.finish_pv(self, v_state)


# ---------------------------------------------------------------- backward


class StampedBackwardProducer(Stamps, BackwardProducer):
    """Stamps each load: the wait for an empty buffer, and the copy that is issued then."""

    def __init__(self, *arguments):
        BackwardProducer.__init__(self, *arguments)
        self.begin_stamps(0, cute.arch.thread_idx()[0])

    def _load_kv(self, pipe, what, *arguments):
        self.stamp("load K" if what is self.k else "load V")
        BackwardProducer._load_kv(self, pipe, what, *arguments)
        self.stamp("other")

    def _load(self, pipe, state, what, *arguments):
        self.stamp("load Q" if what is self.q else "load dO")
        BackwardProducer._load(self, pipe, state, what, *arguments)
        self.stamp("other")


class StampedBackwardConsumer(Stamps, BackwardConsumer):
    """Stamps turns, GEMMs, P, dS, sums of dQ and stores of 64 keys."""

    def __init__(self, *arguments):
        BackwardConsumer.__init__(self, *arguments)
        self.begin_stamps(self.thread.wg + FIRST_ROLE_OF_CONSUMERS, self.thread.number)
        self.stamp_calls(self.pingpong, "wait", "wait for the turn", "issue GEMMs")
        self.stamp_calls(self.pingpong, "pass_on", None, "wait for GEMMs")
        self.stamp_calls(self.exchange, "wait_for_ds", "wait for dS", None)
        self.stamp_calls(self.exchange, "send_ds", None, "other")
        self.stamp_calls(self.scores, "make_p", "P = exp(S - lse)", "wait for GEMMs")
        self.stamp_calls(self.scores, "make_ds", "dS = P (dP - delta)", None)
        self.stamp_calls(self.sums, "add", "add dQ", "wait for GEMMs")

    def store(self, *arguments):
        self.stamp("store")
        BackwardConsumer.store(self, *arguments)
        self.stamp_global_time()
        self.stamp("other")


@contextlib.contextmanager
def stamping(address: int) -> Iterator[None]:
    """A context in which kernels are compiled with the stamped roles.

    Args: address: the address of int64 zeros, (roles, STAMPS_PER_ROLE), that outlive the compiled kernels.
    """
    forward, backward = mock.patch.multiple, mock.patch.multiple
    with (
        mock.patch.object(Stamps, "address", address),
        forward(forward_kernel, Producer=StampedProducer, Consumer=StampedConsumer),
        backward(backward_kernel, BackwardProducer=StampedBackwardProducer, BackwardConsumer=StampedBackwardConsumer),
    ):
        yield
