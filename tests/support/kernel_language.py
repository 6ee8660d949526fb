"""The kernel language as Python: modules of device code that call the machine of hopper_in_python.py.

The modules are imported with stand-ins for cutlass; `Launch` then gives each of them the names that it uses.
"""

import importlib
import importlib.abc
import importlib.machinery
import math
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

from hopper_in_python import (
    LANES,
    Buffer,
    Ended,
    Machine,
    MBarrier,
    Pipe,
    Registers,
    Shared,
    State,
    Words,
    tma_partition,
)

DEVICE = "onepass.kernels.device"


# ---------------------------------------------------------------- modules


def _undecorated(function=None, **_options):
    return _undecorated if function is None else function


class _Language(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes modules of the kernel language whose contents are stand-ins."""

    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("cutlass", "cuda"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return ModuleType(spec.name)

    def exec_module(self, module):
        stand_ins = {"jit": _undecorated, "kernel": _undecorated, "Float32": float}
        stand_ins |= dict.fromkeys(("Int32", "Int64", "Int16", "Boolean"), int)
        module.__dict__.update(stand_ins if module.__name__ in ("cutlass", "cutlass.cute") else {})
        module.__getattr__ = lambda name: MagicMock(name=name)


def device_modules(name):
    """Fresh modules of device code: the one with this name in `onepass.kernels.device`, and those that it imports."""

    def is_replaced(name):
        return name.split(".")[0] in ("cutlass", "cuda") or f"{name}.".startswith(f"{DEVICE}.")

    language, parent = _Language(), importlib.import_module("onepass.kernels")
    real = {name: sys.modules.pop(name) for name in list(sys.modules) if is_replaced(name)}
    device = vars(parent).get("device")
    sys.meta_path.insert(0, language)
    try:
        importlib.import_module(f"{DEVICE}.{name}")
        return {name[len(DEVICE) + 1 :]: sys.modules[name] for name in sys.modules if name.startswith(f"{DEVICE}.")}
    finally:
        sys.meta_path.remove(language)
        for name in [name for name in sys.modules if is_replaced(name)]:
            del sys.modules[name]
        sys.modules.update(real)
        if device is not None:
            parent.device = device


# ---------------------------------------------------------------- the kernel language


def warps_range(*bounds, unroll=None):
    """A loop; its warp's lanes share one that goes by LANES."""
    return range(*bounds[:2]) if bounds[2:] == (LANES,) else range(*bounds)


def size(value, mode=None):
    if isinstance(value, tuple):
        return math.prod(value) if mode is None else value[mode[0]]
    return len(value) if isinstance(value, Registers) else value if isinstance(value, int) else 64


class Divisor(int):
    divisor = property(int)


class Slices(str):
    """A tiled GEMM or copy, and the thread's slice of it: an operand is the tensor that it is made from."""

    def get_slice(self, thread):
        return self

    def retile(self, t):
        return t

    partition_A = partition_B = partition_S = partition_D = make_fragment_A = make_fragment_B = retile

    def partition_shape_C(self, shape):
        return 4


class Nothing:
    """What has no effect here."""

    def __call__(self, *_, **__):
        return self

    def __getattr__(self, name):
        return self


class Names(SimpleNamespace):
    """Stand-ins by name; all other names have no effect."""

    def __getattr__(self, name):
        return Nothing()


def language(machine):
    """The names of the kernel language, and of our single instructions, with their stand-ins."""
    here = machine
    arch = Names(
        warp_idx=lambda: here.current.warp,
        lane_idx=lambda: here.current.lane,
        thread_idx=lambda: (here.current.warp * LANES + here.current.lane, 0, 0),
        block_idx=lambda: (here.current.block.index, 0, 0),
        grid_dim=lambda: (here.num_blocks, 1, 1),
        block_idx_in_cluster=lambda: here.current.block.rank,
        make_warp_uniform=lambda value: value.content if isinstance(value, Buffer) else value,
        shuffle_sync_bfly=lambda value, offset: value,
        vote_any_sync=bool,
        elect_one=here.elect_one,
        sync_warp=here.sync_warp,
        sync_threads=here.barrier,
        barrier=here.barrier,
        barrier_arrive=here.barrier_arrive,
        cluster_arrive=here.cluster_arrive,
        cluster_arrive_relaxed=here.cluster_arrive,
        cluster_wait=here.cluster_wait,
        mbarrier_init=lambda barrier, arrivals: setattr(barrier, "value", MBarrier(arrivals)),
        mbarrier_wait=here.wait,
        mbarrier_test_wait=lambda barrier, phase: barrier.value.phase != phase,
        mbarrier_arrive=here.arrive,
        mbarrier_arrive_and_expect_tx=here.arrive,
        fence_acq_rel_gpu=here.fence,
    )
    cute = Names(
        arch=arch,
        size=size,
        copy=here.copy,
        FastDivmodDivisorV2=Divisor,
        make_rmem_tensor=lambda shape, dtype: Registers(size(shape) if isinstance(shape, (int, tuple)) else 4),
        make_tensor=lambda iterator, layout: iterator,
        make_layout=lambda shape: shape,
        group_modes=lambda t, *_: t,
        autovec_copy=copy_registers,
        make_tiled_copy_C=lambda *_: Slices("copy"),
        ceil_div=lambda a, b: -(-a // b),
        domain_offset=lambda offset, t: Words(t.values, offset[0]) if isinstance(t, Words) else t,
        recast_tensor=lambda t, dtype: t,
        make_ptr=lambda dtype, address, space, assumed_align: address,
    )
    cutlass = Names(
        const_expr=lambda value: value,
        range_constexpr=range,
        range=warps_range,
        Float8E4M3FN=SimpleNamespace(width=8),
        **dict.fromkeys(("Int8", "Int16", "Int64"), int),
    )

    def create(num_stages, producer_group, consumer_group, tx_count, cta_layout_vmnk, barrier_storage, defer_sync):
        groups = producer_group, consumer_group
        return Pipe(here, num_stages, *groups, tx_count, cta_layout_vmnk[1], barrier_storage)

    pipeline = SimpleNamespace(
        PipelineTmaAsync=SimpleNamespace(create=create),
        PipelineState=State,
        Agent=Nothing(),
        CooperativeGroup=lambda thread, count=1: count,
        PipelineUserType=SimpleNamespace(Producer=1, Consumer=0),
        make_pipeline_state=lambda user, stages: State(stages, 0, 0, user),
    )
    smem = SimpleNamespace(allocate_array=here.barriers, allocate_tensor=lambda *_: here.allocate(Shared))
    return {
        "cute": cute,
        "cutlass": cutlass,
        "pipeline": pipeline,
        "cpasync": Names(tma_partition=tma_partition),
        "SmemAllocator": lambda: smem,
        "warpgroup": SimpleNamespace(wait_group=here.wait_group),
        "warp": Names(broadcast=lambda value, lane: value),
        "look_at": here.look_at,
        "is_phase_over": here.is_phase_over,
        "increment": here.draw,
        "draw": here.draw,
        "publish": here.publish,
        "wait_while_zero": here.wait_while_zero,
        "wait_until_equal": lambda word, value, seen: here.pause(lambda: word.value == value),
        "arrive_at": here.arrive_at,
        "arrive_at_first": lambda barrier, count, lane: [here.arrive_at(barrier, rank) for rank in range(count)],
        "send_word": here.send_word,
        "add_here": lambda a, b: a + b if b else a,
        "at_head": lambda t, m, head, origin, is_packed, along=0: t[None, None, head, origin],
        **dict.fromkeys(("copy_of", "transposed", "as_operand_a", "rows_and_columns"), lambda value: value),
        "order_after_words": lambda words: None,
        "exit_if": exit_if,
    }


def copy_registers(source, target):
    if isinstance(target, Buffer):
        target.write(0, source.content)
    else:
        target.fill(source.content)


def exit_if(condition):
    if condition:
        raise Ended


class Launch:
    """A launch of a kernel on a machine. Attributes: modules: those of device code, see `device_modules`."""

    def __init__(self, modules, kernel, seed):
        self.modules, self.kernel, self.machine = modules, kernel, Machine(seed)
        kernel.machine, self.counter = self.machine, Words()

    def replace_parts(self, **stand_ins):
        """Give modules the kernel language and these stand-ins for the names that they have."""
        stand_ins = language(self.machine) | stand_ins
        stand_ins["cute"].local_tile = self.local_tile
        for module in self.modules.values():
            for name in vars(module).keys() & stand_ins.keys():
                setattr(module, name, stand_ins[name])
        self.modules["blocks.tiles.queue"].TileQueue._draw = lambda queue: self.draw(queue)

    def draw(self, queue):
        value = queue.counter.iterator.value
        queue.counter[0] = 0 if value >= queue.num_tiles - 1 else value + 1
        self.machine.changed()
        return value
