"""The files in which faults are planted, and the quick tests of each module and of its users that judge them.

Tests of machine code, of digests and of documentation are in no list, since they notice any change.
"""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatch

MEASUREMENTS = "measurements: no value of a result depends on them"
LAYOUTS = "layouts of copies: a wrong one does not compile, or is Hopper's"
SM90_DEVICE = "device code of Hopper kernels: no test without a GPU runs it by value"


@dataclass(frozen=True)
class Group:
    """Files that share a list of tests.

    Attributes:
        files: patterns of paths in the repository; a file belongs to the first group of an area that matches it.
        tests: arguments for pytest; the module's own tests come first.
        only: an expression for pytest's -k.
    """

    files: tuple[str, ...]
    tests: tuple[str, ...]
    only: str = ""


@dataclass(frozen=True)
class Area:
    """A region of the package; equally many faults are drawn from each."""

    name: str
    groups: tuple[Group, ...]

    def group_of(self, file: str) -> Group | None:
        return next((g for g in self.groups if any(fnmatch(file, pattern) for pattern in g.files)), None)


VALIDATION = ("tests/validation/test_validation.py", "tests/validation/test_validation_fp8.py")
SEMANTICS = ("tests/tiled/test_semantics.py", "tests/tiled/test_attention.py", "tests/tiled/test_sinks.py")
LENGTHS = ("tests/validation/test_lengths.py",)
CHECKS = (
    "tests/validation/test_options.py",
    "tests/validation/test_keywords.py",
    *VALIDATION,
    "tests/validation/test_refusals.py",
)
DECODING = ("tests/tiled/test_decode.py", "tests/tiled/test_decode_e4m3.py", "tests/api/test_decode_calls.py")
FP8 = ("tests/tiled/test_quantized.py", "tests/validation/test_validation_fp8.py")
OPERATORS = ("tests/api/test_ops.py", "tests/api/test_fast_path.py", "tests/api/test_fast_path_decode.py")
DISPATCH = (
    "tests/dispatch/test_dispatch.py",
    "tests/dispatch/test_ahead.py",
    "tests/launch/test_tuned.py",
    "tests/compiler/test_warmup.py",
)
ELEMENTS = ("tests/device/test_elements_in_python.py",)
LOOKUPS = ("tests/device/test_lookups_in_python.py",)
MODIFIERS = (*ELEMENTS, "tests/device/test_hidden_values.py", "tests/device/test_sm80_modifiers.py")
LISTS = ("tests/launch/test_modifier_arguments.py", "tests/device/test_block_lists_values.py", *LOOKUPS)
LAUNCH = (
    "tests/launch/test_kernel_keys.py",
    "tests/launch/test_argument_values.py",
    "tests/launch/test_passed_arguments.py",
    "tests/launch/test_launch.py",
    "tests/launch/test_decode_launch.py",
    "tests/launch/test_backward_launch.py",
    "tests/launch/test_backward_launch_sm80.py",
    "tests/launch/test_quantize_launch.py",
)
FORMULAS = (
    "tests/geometry/test_block_range.py",
    "tests/geometry/test_splits.py",
    "tests/geometry/test_tile_scheduler.py",
    "tests/geometry/test_key_blocks.py",
    "tests/geometry/test_query_blocks.py",
    "tests/geometry/test_pack_gqa.py",
    "tests/geometry/test_backward_turns.py",
    "tests/device/test_forward_sm80_values.py::test_more_sequences_than_a_warp_has_lanes",
)
FORWARD = ("tests/device/test_forward_sm80_values.py",)
BACKWARD = ("tests/device/test_backward_sm80_values.py",)
DECODE = (*LOOKUPS, "tests/device/test_decode_values.py")
DECODE_E4M3 = (*LOOKUPS, "tests/device/test_e4m3.py", "tests/device/test_decode_e4m3_values.py")
QUANTIZE = ("tests/device/test_quantize_values.py",)
MODIFIED = ("tests/tiled/test_tiled_modifiers.py",)
FLASH_ATTN = (
    "tests/compat/test_entry_points.py",
    "tests/compat/test_flash_attn.py",
    "tests/compat/test_flash_attn_options.py",
    "tests/compat/test_flash_attn_3.py",
    "tests/compat/test_flash_attn_3_cache.py",
    "tests/compat/test_flash_attn_4.py",
    "tests/compat/test_flash_attn_private.py",
)
COMPILER = (
    "tests/compiler/test_compile_cache.py",
    "tests/compiler/test_cache_archive.py",
    "tests/compiler/test_kernel_sources.py",
    "tests/compiler/test_cpu.py",
    "tests/compiler/test_pool.py",
    "tests/launch/test_tuned.py",
    "tests/tools/test_cli.py",
    "tests/tools/test_cli_bench.py",
)

AREAS = (
    Area(
        "host",
        (
            Group(
                ("onepass/validation/scalars.py", "onepass/validation/layout_hints.py", "onepass/api/keywords.py"),
                CHECKS,
            ),
            Group(
                ("onepass/dispatch/choice.py",),
                ("tests/dispatch/test_use_backend.py", "tests/dispatch/test_mixed_gpus.py"),
            ),
            Group(("onepass/dispatch/ahead.py",), ("tests/dispatch/test_ahead.py",)),
            Group(("onepass/ops/autocast.py",), ("tests/api/test_ops.py", *FP8[:1])),
            Group(("onepass/ops/gradient_rule.py",), ("tests/api/test_functional.py", "tests/api/test_ops.py")),
            Group(("onepass/ops/schema.py",), ("tests/api/test_ops.py", "tests/api/test_modified_ops.py")),
            Group(("onepass/geometry/visible_pairs.py",), ("tests/api/test_flop_counter.py",)),
            Group(("onepass/masks.py",), ("tests/api/test_mask_functions.py",)),
            Group(
                ("onepass/validation/block_mask.py",),
                ("tests/api/test_block_mask.py", "tests/api/test_block_sparsity.py"),
            ),
            Group(("onepass/geometry/philox.py",), ("tests/geometry/test_philox.py",)),
            Group(("onepass/geometry/rotary.py",), ("tests/compat/test_rotary.py", "tests/tiled/test_decode.py")),
            Group(
                ("onepass/ops/without_backward.py",),
                ("tests/api/test_modified_ops.py", "tests/compat/test_flash_attn_options.py"),
            ),
            Group(
                ("onepass/api/steps.py",),
                ("tests/compat/test_flash_attn_private.py", "tests/compat/test_flash_attn_options.py"),
            ),
            Group(("onepass/validation/modifiers.py",), ("tests/validation/test_modifier_checks.py", *CHECKS)),
            Group(("onepass/tiled/modifiers.py",), MODIFIED),
            Group(
                (
                    "onepass/dispatch/attention.py",
                    "onepass/dispatch/backends.py",
                    "onepass/dispatch/partials.py",
                    "onepass/dispatch/fp8.py",
                    "onepass/api/calls.py",
                ),
                (*DISPATCH, *OPERATORS, *DECODING[2:], "tests/dispatch/test_use_backend.py"),
            ),
            Group(
                ("onepass/quantization/*.py", "onepass/ops/quantize.py", "onepass/ops/fp8.py", "onepass/api/fp8.py"),
                (*FP8, "tests/launch/test_quantize_launch.py"),
            ),
            Group(
                (
                    "onepass/api/decode*.py",
                    "onepass/ops/decode.py",
                    "onepass/dispatch/decode.py",
                    "onepass/validation/decode.py",
                    "onepass/validation/descales.py",
                    "onepass/validation/overlap.py",
                    "onepass/problem/decode.py",
                    "onepass/problem/descales.py",
                    "onepass/api/repeated.py",
                ),
                (
                    *DECODING,
                    "tests/api/test_repeated.py",
                    "tests/api/test_fast_path_decode.py",
                    "tests/api/test_flop_counter.py",
                    "tests/launch/test_decode_launch.py",
                    "tests/validation/test_overlap.py",
                ),
            ),
            Group(
                ("onepass/tiled/merge.py", "onepass/api/partials.py", "onepass/ops/partials.py"),
                ("tests/tiled/test_decode.py", *SEMANTICS),
            ),
            Group(
                ("onepass/api/attention.py", "onepass/ops/attention.py", "onepass/api/fast_path.py"),
                (
                    *OPERATORS,
                    "tests/dispatch/test_dispatch.py",
                    *VALIDATION,
                    *SEMANTICS,
                    *FP8[:1],
                    "tests/compat/test_sdpa.py",
                ),
            ),
            Group(
                ("onepass/problem/attention.py", "onepass/problem/outputs.py"),
                (*LAUNCH[:1], *SEMANTICS, *OPERATORS, *VALIDATION, "tests/launch/test_launch.py", *FORMULAS[:1]),
            ),
            Group(
                (
                    "onepass/validation/*attention.py",
                    "onepass/validation/*s.py",
                    "onepass/validation/fp8.py",
                    "onepass/problem/arguments.py",
                    "onepass/problem/lengths.py",
                ),
                (*LENGTHS, *VALIDATION, "tests/api/test_fast_path.py", *SEMANTICS, FP8[0]),
            ),
        ),
    ),
    Area(
        "tiled",
        (
            Group(
                ("onepass/tiled/decode.py", "onepass/tiled/cache.py"),
                (*DECODING[:2], "tests/api/test_fast_path_decode.py"),
            ),
            Group(
                ("onepass/tiled/*.py",),
                (
                    *SEMANTICS,
                    *MODIFIED,
                    "tests/tiled/test_negative_windows.py",
                    "tests/tiled/test_precision.py",
                    "tests/tiled/test_decode.py",
                    "tests/tiled/test_quantized.py",
                ),
            ),
        ),
    ),
    Area(
        "cpu",
        (
            Group(
                ("onepass/cpu/*.py",),
                (
                    "tests/cpu/test_regions.py",
                    "tests/cpu/test_masks.py",
                    "tests/cpu/test_kept_blocks.py",
                    "tests/cpu/test_cpu_backend.py",
                    *MODIFIED,
                ),
            ),
        ),
    ),
    Area(
        "integer formulas",
        (
            Group(
                (
                    "onepass/geometry/block_range.py",
                    "onepass/geometry/integers.py",
                    "onepass/geometry/pack_gqa.py",
                    "onepass/geometry/pages.py",
                    "onepass/geometry/splits.py",
                ),
                FORMULAS,
            ),
            Group(("onepass/geometry/tile_scheduler.py",), (*FORMULAS, *DECODE)),
        ),
    ),
    Area(
        "launch",
        (
            Group(("onepass/kernels/launch/quantize.py",), ("tests/launch/test_quantize_launch.py", *QUANTIZE)),
            Group(
                (
                    "onepass/kernels/launch/append.py",
                    "onepass/kernels/launch/decode.py",
                    "onepass/kernels/launch/merge.py",
                    "onepass/kernels/launch/decode_sm80.py",
                ),
                ("tests/launch/test_passed_arguments.py", "tests/launch/test_decode_launch.py", *DECODE),
            ),
            Group(
                ("onepass/kernels/launch/modifiers.py",),
                ("tests/launch/test_argument_values.py", *LISTS[:1], *MODIFIERS),
            ),
            Group(("onepass/kernels/launch/block_lists.py",), LISTS),
            Group(
                ("onepass/kernels/launch/float32_halves.py",),
                ("tests/launch/test_launch.py", "tests/device/test_float32_halves_values.py"),
            ),
            Group(
                ("onepass/kernels/launch/*.py",),
                (*LAUNCH, *DISPATCH),
            ),
        ),
    ),
    Area(
        "kernels",
        (
            Group(("onepass/kernels/device/memory_bound/merge.py",), DECODE, "merge or splits"),
            Group(
                ("onepass/kernels/device/memory_bound/append.py",),
                (*ELEMENTS, *DECODE, "tests/device/test_decode_e4m3_values.py"),
                "rotations or append or bad_lengths or new_keys",
            ),
            Group(
                (
                    "onepass/kernels/device/memory_bound/backward_rows.py",
                    "onepass/kernels/device/memory_bound/sink_gradients.py",
                    "onepass/kernels/device/sm80/backward/*.py",
                ),
                (*ELEMENTS, *BACKWARD),
            ),
            Group(
                (
                    "onepass/kernels/device/sm90/backward/*.py",
                    "onepass/kernels/device/blocks/tiles/queue.py",
                    "onepass/kernels/device/blocks/tiles/pingpong.py",
                ),
                ("tests/device/test_backward_protocol.py",),
            ),
            Group(
                ("onepass/kernels/device/memory_bound/block_lists.py",),
                (*LISTS[1:], "tests/device/test_sm80_modifiers.py"),
            ),
            Group(
                (
                    "onepass/kernels/device/blocks/softmax/modifiers.py",
                    "onepass/kernels/device/blocks/softmax/dropout.py",
                ),
                MODIFIERS,
            ),
            Group(
                (
                    "onepass/kernels/device/blocks/tiles/dq_sums.py",
                    "onepass/kernels/device/blocks/softmax/gradients.py",
                    "onepass/kernels/device/blocks/repair/gradients.py",
                    "onepass/kernels/device/blocks/memory/row_stats.py",
                    "onepass/kernels/device/blocks/tiles/key_tiles.py",
                ),
                (*LOOKUPS, *BACKWARD),
            ),
            Group(
                (
                    "onepass/kernels/device/sm80/forward/*e4m3*.py",
                    "onepass/kernels/device/blocks/*/e4m3*.py",
                    "onepass/kernels/device/blocks/softmax/cache_scales.py",
                ),
                DECODE_E4M3,
            ),
            Group(
                ("onepass/kernels/device/sm80/forward/few_rows.py", "onepass/kernels/device/blocks/tiles/paged.py"),
                DECODE,
            ),
            Group(
                (
                    "onepass/kernels/device/sm80/*.py",
                    "onepass/kernels/device/blocks/softmax/mask.py",
                    "onepass/kernels/device/blocks/softmax/online.py",
                    "onepass/kernels/device/blocks/repair/rows.py",
                    "onepass/kernels/device/blocks/tiles/schedule.py",
                    "onepass/kernels/device/blocks/softmax/sinks.py",
                    "onepass/kernels/device/blocks/tiles/packed.py",
                    "onepass/kernels/device/blocks/memory/warp.py",
                ),
                (*ELEMENTS, *FORWARD, *DECODE),
            ),
            Group(("onepass/kernels/device/blocks/softmax/scaled.py",), ("tests/device/test_fp8_values.py",)),
            Group(("onepass/kernels/device/sm90/forward/*.py",), ("tests/device/test_forward_roles.py",)),
            Group(("onepass/kernels/device/memory_bound/quantize*.py",), (*ELEMENTS, *QUANTIZE)),
            Group(
                ("onepass/kernels/device/memory_bound/float32_halves.py",),
                ("tests/device/test_float32_halves_values.py",),
            ),
        ),
    ),
    Area(
        "distributed",
        (
            Group(
                ("onepass/distributed/decode.py",),
                (
                    "tests/distributed/test_passed_options.py",
                    "tests/distributed/test_decode_on_ranks.py",
                    "tests/distributed/test_disagreements.py",
                ),
            ),
            Group(("onepass/distributed/agreement.py",), ("tests/distributed/test_disagreements.py",)),
            Group(
                ("onepass/distributed/cost.py", "onepass/distributed/traffic.py"),
                ("tests/distributed/test_schedule.py", "tests/distributed/test_ranks.py"),
            ),
            Group(
                ("onepass/distributed/*.py",),
                (
                    "tests/distributed/test_passed_options.py",
                    "tests/distributed/test_local_calls.py",
                    "tests/distributed/test_schedule.py",
                    "tests/distributed/test_routes.py",
                    "tests/distributed/test_layouts.py",
                    "tests/distributed/test_random_calls_on_ranks.py",
                    "tests/distributed/test_ranks.py",
                    "tests/distributed/test_disagreements.py",
                ),
            ),
        ),
    ),
    Area(
        "compat",
        (
            Group(
                ("onepass/compat/sdpa.py", "onepass/compat/masks.py"),
                ("tests/compat/test_sdpa.py", "tests/integrations/test_torch_sdpa.py"),
            ),
            Group(("onepass/compat/upstream/bert_padding.py",), ("tests/compat/test_bert_padding.py",)),
            Group(("onepass/compat/upstream/rotary.py",), ("tests/compat/test_rotary.py", *FLASH_ATTN[:2])),
            Group(
                ("onepass/compat/installation.py", "onepass/compat/__main__.py"), ("tests/compat/test_installation.py",)
            ),
            Group(("onepass/compat/*.py",), FLASH_ATTN),
        ),
    ),
    Area(
        "integrations",
        (
            Group(("onepass/integrations/torch_sdpa/*.py",), ("tests/integrations/test_torch_sdpa.py",)),
            Group(
                ("onepass/integrations/vllm/*.py",),
                ("tests/integrations/test_vllm_cache.py", "tests/serving/test_layers.py"),
            ),
            Group(
                ("onepass/integrations/transformers*.py",),
                (
                    "tests/compat/test_transformers.py",
                    "tests/compat/test_transformers_packing.py",
                    "tests/compat/test_transformers_masks.py",
                    "tests/compat/test_transformers_generation.py",
                ),
            ),
        ),
    ),
    Area(
        "cli",
        (
            Group(("onepass/cli/demo*.py",), ("tests/tools/test_cli_tables.py", "tests/tools/test_demo.py")),
            Group(("onepass/cli/tune.py",), ("tests/tools/test_cli_tables.py", "tests/tools/test_cli_tune.py")),
            Group(
                ("onepass/cli/*.py",),
                (
                    "tests/tools/test_cli_tables.py",
                    "tests/tools/test_cli.py",
                    "tests/tools/test_cli_bench.py",
                    "tests/tools/test_cli_progress.py",
                ),
            ),
            Group(
                ("onepass/__main__.py", "onepass/log.py", "onepass/startup.py"),
                ("tests/tools/test_log.py", "tests/tools/test_cli.py"),
            ),
            Group(("onepass/variables.py",), ("tests/tools/test_variables.py",)),
            Group(("onepass/processes.py",), ("tests/compiler/test_pool.py",)),
        ),
    ),
    Area(
        "testing",
        (
            Group(("onepass/reference.py",), ("tests/api/test_reference.py", *SEMANTICS, *MODIFIED)),
            Group(
                ("onepass/testing/budget.py", "onepass/testing/rounding.py"),
                ("tests/tools/test_budget.py", *SEMANTICS[1:]),
            ),
            Group(("onepass/testing/*.py",), ("tests/tools/test_testing.py", *SEMANTICS[1:], *FP8[:1], *DECODING)),
            Group(
                ("onepass/tuning/*.py",),
                ("tests/tools/test_tune.py", "tests/tools/test_tune_calls.py", "tests/tools/test_tuning.py"),
            ),
            Group(("onepass/kernels/compiler/*.py",), COMPILER),
        ),
    ),
)

# Files that are left out, and why.
OUT_OF_REACH = {
    "onepass/*__init__.py": "nothing to change",
    "onepass/fp8.py": "import paths",
    "onepass/decode.py": "import paths",
    "onepass/compat/bert_padding.py": "an old name",
    "onepass/compat/rotary.py": "an old name",
    "onepass/namespace.py": "names of operators",
    **{
        f"onepass/kernels/device/sm90/forward/{name}.py": SM90_DEVICE
        for name in ("kernel", "converter", "transposer", "scales", "rows", "output", "inputs", "__init__")
    },
    "onepass/kernels/device/sm90/__init__.py": SM90_DEVICE,
    "onepass/kernels/device/sm90/backward/[dgikrs]*.py": SM90_DEVICE,
    "onepass/kernels/device/blocks/memory/clear.py": SM90_DEVICE,
    "onepass/kernels/device/blocks/tiles/named_barrier.py": SM90_DEVICE,
    "onepass/kernels/device/blocks/memory/wgmma.py": SM90_DEVICE,
    "onepass/kernels/device/blocks/memory/untraced.py": "carries values, computes none",
    "onepass/kernels/device/blocks/memory/epilogue.py": LAYOUTS,
    "onepass/kernels/device/blocks/memory/layouts.py": LAYOUTS,
    "onepass/kernels/device/blocks/memory/ptx.py": "text of instructions, and Hopper's",
    "onepass/errors.py": "names of errors",
    "onepass/bench/*": MEASUREMENTS,
    "onepass/tuning/timing.py": MEASUREMENTS,
    "onepass/testing/machine.py": MEASUREMENTS,
    "onepass/testing/results.py": MEASUREMENTS,
    "onepass/kernels/arguments.py": "names of arguments",
    "onepass/kernels/device/entry.py": "how arguments reach a kernel: without it none compiles",
    "onepass/kernels/heuristics/*": "which configuration is fast: no value depends on it",
    "onepass/kernels/config*": "which configurations there are: their shipped ones are compiled by other tests",
    "onepass/distributed/parallel_style.py": "an interface",
    "onepass/tiled/tile_sizes.py": "how large tiles are: no value depends on it",
    "onepass/tiled/scratch.py": "where memory comes from: no value depends on it",
}
# Classes and functions that are left out of files in reach, with everything inside of them.
SCOPES_OUT_OF_REACH = {
    ("onepass/kernels/device/blocks/tiles/paged.py", "BoxLocations"): SM90_DEVICE,
    **{
        (f"onepass/kernels/device/sm90/forward/{file}.py", scope): SM90_DEVICE
        for file, scopes in {
            "consumer": ("Consumer.__init__",),
            "gemms": ("ForwardGemms.__init__",),
            "scores": ("ForwardScores.__init__", "TileModifiers"),
            "producer": ("Producer.__init__", "Producer._partition", "Producer._partition_pages"),
        }.items()
        for scope in scopes
    },
}


def reason_out_of_reach(file: str, scope: str = "") -> str | None:
    for (scope_file, name), reason in SCOPES_OUT_OF_REACH.items():
        if file == scope_file and f"{scope}.".startswith(f"{name}."):
            return reason
    return next((reason for pattern, reason in OUT_OF_REACH.items() if fnmatch(file, pattern)), None)
