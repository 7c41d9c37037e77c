"""Faults that people met in tools like this one (`shared/cases.md`), and the tests here that would find them.

A row of that file names a kind of fault; this table says where the kind is tried. The tests of this file hold the table itself: every test it
names exists, and where the file is at hand, every row of it is in the table.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CASES = TESTS.parents[1] / "shared" / "cases.md"

TRIED: dict[str, str] = {
    # compile and dispatch
    "A1": "tensors/test_products::compiled_equals_eager_with_any_batch integrations/test_compile::a_model_is_one_graph_for_every_batch_and_length",
    "A3": "tensors/test_views::overlapping_views_of_one_weight_compile",
    "A5": "kernels/triton/test_cuda::compiled_and_replayed_products_equal_eager_ones",
    # state, saving, copies
    "B1": "tensors/test_hosts::state_dicts_load_back integrations/test_folders::state_dicts",
    "B3": "tensors/test_hosts::a_fresh_process_loads_every_format integrations/test_folders::checkpoints_in_a_fresh_process",
    "B5": "tensors/test_hosts::safetensors_refuses_to_write_dense_bytes integrations/test_folders::planes_of_every_format",
    "B6": "tensors/test_hosts::copies tensors/test_hosts::a_pickled_view_leaves_its_parent_behind",
    "B7": "integrations/test_placement::a_dispatched_model_survives_deepcopy",
    # container file
    "C1": "artifact/test_directory::other_versions_are_refused_by_number artifact/test_legacy::golden_files_upgrade_byte_for_byte",
    "C3": "artifact/test_directory::truncated_entries_never_open convert/test_gguf_file::a_file_cut_at_any_sixteenth_is_refused_at_open",
    "C5": "artifact/test_reader::artifact_larger_than_memory_opens_and_reads",
    "C6": "tensors/test_staged::host_memory_is_bounded integrations/test_loading::no_page_of_the_file_is_resident_after_the_load",
    "C8": "convert/test_hf_source::provenance_names_files_and_no_path",
    "D1": "artifact/test_reader::wrong_parts_are_refused artifact/test_malformed::rejected_at_its_stage_with_its_kind",
    # GGUF
    "E1": "convert/test_gguf_file::hostile_files_are_refused_by_name_and_without_large_allocations",
    "E3": "convert/test_gguf_file::hostile_files_are_refused_by_name_and_without_large_allocations",
    "E5": "convert/test_gguf_file::hostile_files_are_refused_by_name_and_without_large_allocations",
    "F1": "convert/test_gguf_file::the_older_block_under_type_42_is_told_by_its_span",
    "F3": "convert/test_gguf_source::types_that_nothing_decodes_are_listed_with_what_to_do",
    "F4": "convert/test_gguf_source::a_hadamard_transform_is_never_ignored",
    "G1": "kernels/test_reference_gguf::grids_are_those_of_the_gguf_package kernels/test_reference_gguf::every_grid_entry_is_reached",
    # numbers at their edges
    "H1": "kernels/test_reference_gguf::subnormal_scales kernels/test_cpu::every_scale_and_code_of_sixteen_bits_is_exact",
    "H4": "convert/test_search::zeros_keep_their_words_beside_ordinary_groups kernels/test_checks::golden_objects_are_legal",
    "H5": "convert/test_row_float::rows_of_zeros_beside_ordinary_rows",
    "H6": "convert/test_encoded_sources::illegal_words_are_refused_when_imported",
    "I1": "kernels/test_cpu::int8_activations_of_any_magnitude",
    "I3": "kernels/test_cpu::rows_of_unlike_magnitudes_keep_their_own_scales",
    "J1": "convert/test_encoded_sources::nvfp4_global_scales_in_both_senses",
    "J2": "test_layouts::swizzle_moves_each_word_where_the_formula_says",
    "J4": "convert/test_encoded_sources::golden_checkpoint_gives_the_golden_objects",
    # shapes
    "K1": "kernels/test_packing::padding_is_code_zero_and_its_groups_have_scale_zero",
    "K3": "tensors/test_products::linear_with_partial_groups kernels/triton/test_interpreted::any_width",
    "K4": "kernels/test_cpu_process::no_kernel_reads_outside_its_tensors kernels/triton/test_interpreted::any_width",
    "K6": "convert/test_pipeline::no_fallback_lists_every_tensor",
    "K9": "test_layouts::planes_are_views_of_the_payload",
    "K10": "kernels/triton/test_compile::decode_kernels_keep_everything_in_registers",
    "L1": "kernels/triton/test_interpreted::offsets_beyond_two_to_the_31",
    "L2": "kernels/triton/test_cuda::experts",
    "L4": "kernels/test_cpu::products_on_floating_activations test_layouts::illegal_shapes_and_divisors_are_refused",
    # devices
    "M1": "tensors/test_hosts::modules_move_whole integrations/test_placement::moves_to_a_card_and_back",
    "M3": "integrations/test_placement::moves_keep_words_and_ties",
    "M4": "kernels/triton/test_dispatch::kernels_start_on_the_device_of_their_tensors",
    "M5": "kernels/triton/test_interpreted::tensors_on_two_devices_are_refused kernels/triton/test_cuda::activations_elsewhere_are_refused",
    "M7": "kernels/triton/test_tuning::noise_and_what_does_not_fit_change_nothing",
    # dtypes
    "N1": "integrations/test_quantize::dequantize_to_another_dtype tensors/test_hosts::nobody_sees_the_dtype_of_the_words",
    "N3": "integrations/test_dtypes::module_casts_leave_every_word integrations/test_dtypes::a_loaded_dtype_is_that_of_the_computation",
    "N4": "tensors/test_hosts::nobody_sees_the_dtype_of_the_words",
    "N6": "tensors/test_hosts::sizes_and_text tensors/test_hosts::nobody_sees_the_dtype_of_the_words",
    "N7": "tensors/test_hosts::nobody_sees_the_dtype_of_the_words",
    # rows and columns
    "O1": "tensors/test_stacked::any_placement_of_rows_is_the_dense_stack models/test_qwen3_5_assembly::fused_parents_give_views_and_mixed_ones_stacks",
    "O3": "tensors/test_views::cuts_inside_a_group_are_refused tensors/test_views::nvfp4_rows_that_are_not_tiles_have_no_object",
    "O4": "tensors/test_views::columns_of_whole_groups integrations/test_tensor_parallel::two_ranks_give_the_logits_of_one",
    "O5": "tensors/test_views::columns_of_swizzled_scales_are_found_in_their_tiles",
    "P1": "convert/test_methods::strided_views_are_quantized_as_their_copies",
    # tied, mapped, missing
    "Q1": "integrations/test_loading::separate_weights_stay_separate_though_the_config_ties_them",
    "Q3": "integrations/test_loading::a_tied_head_may_be_left_out",
    "Q5": "convert/test_gguf_source::registered_blocks_come_whole_and_in_the_original_row_order",
    "Q6": "convert/test_gguf_architectures::values_equal_the_original",
    "Q7": "integrations/test_loading::a_missing_parameter_is_named integrations/test_loading::an_extra_parameter_is_named",
    "Q8": "convert/test_unusable_sources::nothing_is_written_and_the_tensor_is_named integrations/test_loading::a_missing_parameter_is_named",
    # experts
    "R1": "integrations/test_official::every_implementation_of_experts_stays_packed integrations/test_expert_banks::a_preset_quantizes_the_banks_and_nothing_is_made_dense",
    "R2": "models/test_generic::every_matrix_that_stays_direct_says_why",
    "R4": "integrations/test_expert_banks::other_presets_quantize_banks_too",
    # adapters and offloading
    "S1": "integrations/test_adapters::a_merge_is_refused_by_name_and_before_anything_happens",
    "S2": "integrations/test_adapters::lora_trains_saves_and_loads",
    "S4": "tensors/test_hosts::parameters_are_rebuilt_as_hosts_do integrations/test_placement::accelerate_sets_a_weight_by_name",
    # importance and import
    "T1": "convert/test_importance::illegal_entries_are_refused_in_both_directions convert/test_importance::zeros_from_a_file_leave_the_absmax_words",
    "T3": "convert/test_importance::vectors_of_one_parent_are_averaged convert/test_search::errors_say_where",
    "T5": "convert/test_importance::gguf_names_become_every_logical_name_they_answer_for",
    "T6": "convert/test_encoded_sources::one_checkpoint_mixes_schemes",
    "T8": "models/test_generic::every_matrix_that_stays_direct_says_why",
    # direct formats, errors
    "U1": "artifact/test_golden::every_format_reads_and_decodes_exactly integrations/test_loading::a_quantized_norm_is_refused",
    "U3": "integrations/test_loading::a_wrong_shape_names_object_and_both_shapes",
    "U4": "artifact/test_directory::a_thousand_damaged_directories_open_or_raise_typed_errors",
}


@cache
def defined(module: str) -> frozenset[str]:
    tree = ast.parse((TESTS / f"{module}.py").read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("case", TRIED)
def test_a_kind_of_fault_is_tried(case: str) -> None:
    for name in TRIED[case].split():
        module, _, test = name.partition("::")
        assert f"test_{test}" in defined(module), name


def test_every_row_of_the_list_is_in_the_table() -> None:
    if not CASES.is_file():
        pytest.skip(f"the list of cases is not at hand: {CASES.name}")
    rows = re.findall(r"^\| ([A-Z]\d+) \|", CASES.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows and set(rows) == set(TRIED)
