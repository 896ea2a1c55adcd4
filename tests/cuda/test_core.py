"""The tests of `_core`'s tables, run once more on a device: same oracles, same expected values.

Not run again: what is of the CPU alone (threads, places of memory, memory of small tables, order of
routed keys), and what tests of this folder hold with the device's own words or figures.
"""

# ruff: noqa: F401, what is imported is collected here

import pytest

from tests.core import (
    test_adam_replay,
    test_assign,
    test_combine,
    test_optimizers,
    test_policies,
    test_policy_details,
    test_table,
)
from tests.core.test_adam_replay import (
    test_a_read_does_not_count_as_a_step,
    test_assigned_row_stands_from_then_on,
    test_gap,
    test_momentum_gap,
)
from tests.core.test_assign import (
    test_assign_against_dict,
    test_assign_between_steps_follows_the_dense_table,
    test_close_to_max_capacity_a_new_sample_changes_nothing,
    test_close_to_max_capacity_the_number_of_different_new_keys_decides,
    test_find_or_insert_against_dict,
    test_row_numbers_left_over_by_repeated_keys_are_used_once,
)
from tests.core.test_combine import test_combine_and_gradients, test_empty_batch
from tests.core.test_optimizers import (
    test_a_full_table_makes_no_step,
    test_a_key_that_comes_between_an_import_and_the_optimizer,
    test_export_between_steps_changes_nothing,
    test_imported_slots_are_adopted,
    test_non_finite_gradients_stay_in_their_row,
    test_other_rule_or_option_is_refused,
    test_repeated_keys_are_summed_before_the_rule,
    test_rule_follows_its_formula,
    test_unique_keys_need_no_search,
    test_unknown_option_raises,
    test_what_cannot_be_honoured_raises,
)
from tests.core.test_policy_details import (
    test_a_crowded_bloom_filter_never_counts_too_seldom,
    test_a_roomy_bloom_filter_counts_exactly,
    test_counters_have_the_width_asked_for,
    test_policies_out_of_range,
)
from tests.core.test_table import (
    test_assign_last_of_equal_keys_wins,
    test_extreme_keys_are_keys_like_any_other,
    test_keys_that_share_shard_home_bucket_and_digest,
    test_max_capacity_is_all_or_nothing,
    test_slots_survive_export_and_import,
)
from tests.cuda.core_on_device import Core

MODULES = [
    test_adam_replay,
    test_assign,
    test_combine,
    test_optimizers,
    test_policies,
    test_policy_details,
    test_table,
]


@pytest.fixture(autouse=True)
def core_on_device(cuda, monkeypatch):
    core = Core(cuda)
    for module in MODULES:
        monkeypatch.setattr(module, "_core", core)
