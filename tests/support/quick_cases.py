"""Which cases of the slow tests `make test` runs. All other cases of these tests are marked slow.

Compiling a kernel for a GPU or interpreting one takes 1 to 5 seconds, and each of these tests has many cases that share
most of their code. The quick cases are examples: some kernels, such as Hopper's backward for head_dim 256, have none.
`make test-slow` runs the rest, and continuous integration runs both.

A test has a list of the names of its quick cases, as pytest prints them in brackets. An empty list makes the test slow.
"""

from __future__ import annotations

QUICK_CASES: dict[str, list[str]] = {
    # ---------------------------------------------------------------- machine code
    "device/test_forward_sm90_machine_code.py::test_machine_code": [
        "64 to 1024",
        "128 float16 window softcap sinks GQA",
        "128 group of 4",
    ],
    "device/test_forward_sm90_fp8.py::test_machine_code": ["64 causal packed-False"],
    "device/test_forward_sm90_float32.py::test_machine_code": ["256"],
    "device/test_forward_sm90_float32.py::test_three_products_for_one_of_16_bits": [],
    "device/test_forward_sm90_float32.py::test_machine_code_of_the_halves_kernel": ["64 of v", "192 packed"],
    "device/test_backward_sm90_machine_code.py::test_machine_code": [
        "128 deterministic",
    ],
    "device/test_backward_sm90_machine_code.py::test_rows_before": ["40-True-True", "128-False-True"],
    "device/test_backward_sm90_machine_code.py::test_rows_after": [
        "40-full",
        "128-float16 packed seqused GQA window softcap",
        "256-causal",
    ],
    "device/test_forward_sm80_machine_code.py::test_every_architecture": ["sm_86-256-dtype0", "sm_90a-128-dtype1"],
    "device/test_backward_sm80_machine_code.py::test_every_architecture": ["sm_80-128", "sm_90a-256"],
    "device/test_backward_sm80_machine_code.py::test_float32": ["sm_86-256"],
    "device/test_decode_machine_code.py::test_warps_along_the_keys": ["sm_90a-64-True"],
    "device/test_decode_machine_code.py::test_warps_along_the_rows": ["sm_86-256-False-False"],
    "device/test_decode_machine_code.py::test_wide_heads_and_more_rows": ["changes0"],
    "device/test_decode_machine_code.py::test_float32_on_all_that_shared_memory_holds": [],
    "device/test_decode_machine_code.py::test_e4m3_cache": ["sm_90a-128-True"],
    "device/test_decode_sm90_machine_code.py::test_loads": [],
    "device/test_decode_sm90_machine_code.py::test_configurations": ["head_dims0-64-False-changes0"],
    "device/test_quantize_machine_code.py::test_machine_code": ["128-sm_90a", "128 packed-sm_90a", "256-sm_90a"],
    # ---------------------------------------------------------------- values, in the interpreter
    "device/test_forward_sm80_values.py::test_values": [
        "causal",
        "float32 8-byte copies, 5 heads in a tile",
    ],
    "device/test_forward_sm80_values.py::test_no_order_of_copies_and_warps_matters": ["3 stages, lazy"],
    "device/test_forward_sm80_values.py::test_scores_that_grow_are_rescaled_lazily": ["dtype1"],
    "device/test_forward_sm80_values.py::test_random_calls": [],
    "device/test_forward_sm80_values.py::test_nan_of_a_hidden_key_stays_hidden": ["dtype0-head_dims0"],
    "device/test_forward_sm80_values.py::test_infinity_in_float32": [],
    "device/test_forward_sm80_values.py::test_float32_over_many_keys": [],
    "device/test_backward_sm80_values.py::test_values": [
        "keys before the query",
        "packed sinks, sequences without keys",
    ],
    "device/test_backward_sm80_values.py::test_dk_and_dv_in_float32": [],
    "device/test_backward_sm80_values.py::test_out_of_rows_without_keys_has_no_gradient": [],
    "device/test_decode_values.py::test_values": [
        "chosen",
        "float32 in pages",
        "pages of 1, 16 queries",
        "packed sinks, a sequence without keys, rows of none",
    ],
    "device/test_decode_values.py::test_modifiers": ["packed, ALiBi of each sequence, ranges, window"],
    "device/test_decode_values.py::test_merge": ["True-dtype0-70", "False-dtype1-7"],
    "device/test_decode_values.py::test_splits": ["3"],
    "device/test_decode_values.py::test_windows_with_negative_sides": [],
    "device/test_decode_values.py::test_random_calls": [],
    "device/test_decode_values.py::test_nan_of_a_hidden_key_stays_hidden_in_its_split": [],
    "device/test_decode_values.py::test_the_order_of_copies_and_warps_changes_no_bit": ["5"],
    "device/test_decode_values.py::test_append": [
        "head_dims0-None-None",
        "head_dims2-rotary2-3",
        "head_dims4-rotary4-3",
    ],
    "device/test_decode_e4m3_values.py::test_values": ["pages of 16"],
    "device/test_decode_e4m3_values.py::test_nan_of_a_hidden_key_stays_hidden": ["block of 16-126-None"],
    "device/test_decode_e4m3_values.py::test_descales_that_grow_and_shrink": [],
    "device/test_decode_e4m3_values.py::test_queries_of_any_magnitude": [],
    "device/test_decode_e4m3_values.py::test_append": ["False-none", "True-page", "True-block of 16"],
    "device/test_fp8_values.py::test_values": ["pages of n96-peaked", "sink-peaked", "softcap-peaked"],
    "device/test_fp8_values.py::test_a_row_without_keys": ["sink"],
    "device/test_float32_halves_values.py::test_halves_add_up": ["128"],
    "device/test_float32_halves_values.py::test_packed_sequences": ["seqused_k"],
    "device/test_float32_halves_values.py::test_blocks_of_columns_of_v": [],
    "device/test_float32_halves_values.py::test_rows_past_seqused_k": [],
    "device/test_float32_halves_values.py::test_magnitudes_at_the_ends_of_float32": [],
    "device/test_float32_halves_values.py::test_strides": [],
    "device/test_quantize_values.py::test_means": ["as it was-False-packed", "keys last-True-dense"],
    "device/test_quantize_values.py::test_head_dims": ["(96, 32)-torch.bfloat16", "(128, 128)-torch.float16"],
    "device/test_quantize_values.py::test_packed_sequences": ["as it was-all keys", "keys last-seqused_k"],
    "device/test_backward_protocol.py::test_no_deadlock_and_every_buffer_holds_what_is_read": [
        "Consumer-False-False",
        "Consumer-True-True",
        "Wide-True-True",
    ],
    # ---------------------------------------------------------------- torch.compile
    "api/test_recompilation.py::test_other_numbers": [
        "QuantizedQKV-as it comes",
        "attention, window-as it comes",
        "attention_decode, new keys-as it comes",
        "attention_decode, num_splits-as it comes",
        "attention_varlen, softmax_scale-as it comes",
        "flash_attn_varlen_func, block_table-as it comes",
        "flash_attn_with_kvcache-as it comes",
        "merge_partials-as it comes",
        "scaled_dot_product_attention-as it comes",
    ],
    "api/test_recompilation.py::test_numbers_of_shapes": [
        "attention-dynamic",
        "attention_varlen-dynamic",
        "flash_attn_with_kvcache-dynamic",
    ],
    "api/test_ops.py::test_compile_with_other_numbers": ["tiled-True"],
    "api/test_fp8_surroundings.py::test_compiled_with_any_length": [],
    "api/test_fp8_surroundings.py::test_compiled_attention_with_any_length": [],
    # ---------------------------------------------------------------- several processes, and whole commands
    "dispatch/test_use_backend.py::test_the_environment": [],
    "compat/test_installation.py::test_a_real_library_is_refused_and_can_be_replaced": ["True"],
    "compat/test_installation.py::test_operators_of_flash_attn_3": [],
    "compat/test_installation.py::test_run_refuses_bad_arguments": ["arguments0"],
    "compat/test_installation.py::test_run_a_module": [],
    "compat/test_installation.py::test_undo_is_complete": [],
    # ---------------------------------------------------------------- transformers
    "compat/test_transformers.py::test_padding_of_a_compiled_model": ["mistral-holes"],
    "compat/test_transformers_generation.py::test_continuous_batching": ["2"],
    "compat/test_transformers_generation.py::test_training_by_default": ["T5"],
    # ---------------------------------------------------------------- others
    "geometry/test_backward_turns.py::test_groups_of_heads_are_balanced": ["2048-4", "2048-8"],
    "tools/test_bench_context_parallel.py::test_command_on_two_ranks": [],
    "tools/test_context_parallel_example.py::test_losses_do_not_depend_on_the_number_of_ranks": [],
    "tools/test_timeline.py::test_stamps_cost_no_registers_in_memory_and_do_not_stay": [],
    "tools/test_hub.py::test_two_copies": [],
    "tools/test_hub.py::test_a_copy_compiles_kernels": [],
    "tools/test_tune_calls.py::test_the_whole_way": [],
    "compiler/test_compile_cache.py::test_with_the_compiler": [],
    "compiler/test_warmup_compiles.py::test_a_backward_finds_its_kernels_in_the_cache": [],
    "compiler/test_warmup_compiles.py::test_two_processes_fill_the_cache": [],
    "launch/test_tuned.py::test_concurrent_writers_lose_nothing": [],
    "tiled/test_semantics.py::test_the_first_call_of_a_process_is_exact": [],
    "cpu/test_cpu_backend.py::test_long_random_calls": ["torch.bfloat16"],
    "tools/test_cli.py::test_bench_smoke": [],
    "tools/test_cli.py::test_bench_filters": [],
    "tools/test_mutants.py::test_every_change_is_one_line_that_can_be_parsed": [],
    "tools/test_demo.py::test_a_wrong_result_gives_exit_code_1": ["one_key_too_many"],
    "tools/test_bench_run.py::test_memory_rows_come_from_a_fresh_process": [],
    "tools/test_bench_suites.py::test_ampere_grid": ["bwd-dv"],
}


def is_slow(nodeid: str) -> bool:
    """Whether a case of a test that is named here is not one of its quick ones."""
    test, _, case = nodeid.partition("[")
    quick = QUICK_CASES.get(test.removeprefix("tests/"))
    return quick is not None and case.removesuffix("]") not in quick
