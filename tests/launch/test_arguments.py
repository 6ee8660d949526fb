"""The NamedTuples of kernel arguments, and how a kernel takes one."""

import importlib.util
import inspect

import packages
import pytest

from onepass.kernels import arguments
from onepass.kernels.launch.arguments import in_order

pytestmark = packages.needs_compiler

DEVICE = "onepass.kernels.device"
KERNELS = [
    ("ForwardSm90Arguments", f"{DEVICE}.sm90.forward.kernel", "ForwardSm90"),
    ("ForwardSm80Arguments", f"{DEVICE}.sm80.forward.kernel", "ForwardSm80"),
    ("ForwardSm80Arguments", f"{DEVICE}.sm80.forward.few_rows", "DecodeSm80"),
    ("BackwardSm90Arguments", f"{DEVICE}.sm90.backward.kernel", "BackwardSm90"),
    ("BackwardSm80Arguments", f"{DEVICE}.sm80.backward.kernel", "BackwardSm80"),
    ("PreprocessArguments", f"{DEVICE}.memory_bound.backward_rows", "Preprocess"),
    ("PostprocessArguments", f"{DEVICE}.memory_bound.backward_rows", "Postprocess"),
    ("BlockListsArguments", f"{DEVICE}.memory_bound.block_lists", "BlockLists"),
    ("SinkGradientsArguments", f"{DEVICE}.memory_bound.sink_gradients", "SinkGradients"),
    ("MergeArguments", f"{DEVICE}.memory_bound.merge", "Merge"),
    ("AppendArguments", f"{DEVICE}.memory_bound.append", "Append"),
    ("QuantizeArguments", f"{DEVICE}.memory_bound.quantize", "Quantize"),
    ("KeysLastArguments", f"{DEVICE}.memory_bound.quantize_values", "KeysLast"),
    ("Float32HalvesArguments", f"{DEVICE}.memory_bound.float32_halves", "Float32Halves"),
]


@pytest.mark.parametrize(("name", "module", "kernel"), KERNELS)
def test_each_field_is_a_parameter_of_the_kernel(name, module, kernel):
    """A compiled kernel changes to the device of a tensor that is a parameter, not to that of one in a tuple."""
    function = getattr(importlib.import_module(module), kernel).__call__
    parameters = tuple(inspect.signature(function).parameters)
    assert parameters == ("self", *getattr(arguments, name)._fields, "stream")


def test_every_list_of_arguments_belongs_to_a_kernel():
    lists = {name for name in vars(arguments) if name.endswith("Arguments")}
    assert lists == {name for name, _, _ in KERNELS}


def test_in_order_is_the_named_tuple_itself():
    made = arguments.ForwardSm90Arguments(1, 2, 3, 4, 5, seqused_k=6, num_ctas=7, window_left=8)
    make = in_order(arguments.ForwardSm90Arguments, {"num_ctas": 7, "window_left": 9})
    assert make(1, 2, 3, 4, 5, seqused_k=6, window_left=8) == tuple(made)
    assert in_order(arguments.ForwardSm90Arguments, {})(1, 2, 3, 4, 5) == arguments.ForwardSm90Arguments(1, 2, 3, 4, 5)
    with pytest.raises(TypeError, match="lse"):
        make(1, 2, 3, 4)
