"""Two ranks that save and restore, together or not at all; their part is in checks/saving.py."""

import pytest

pytestmark = [pytest.mark.ranks]


@pytest.fixture
def found(rank_results):
    return rank_results(2, "saving.together")


def test_tables_dumped_in_another_order_raise_and_the_old_dumps_stay(found):
    for seen in (result["order"] for result in found):
        dumps, restore = seen["messages"][:2], seen["messages"][2]
        assert all("RuntimeError: All ranks must make the same calls" in text for text in dumps)
        assert "dump_to_file of table 't0' on rank 0" in dumps[0]
        assert "dump_to_file of table 't1' on rank 1" in dumps[0]
        assert "restore_from_file of table 't1' on rank 1" in restore
        assert seen["kept"] and seen["rows"] == [1.0, 2.0]


def test_a_folder_that_is_not_shared_raises_and_the_old_dumps_stay(found):
    for rank, seen in enumerate(result["shared"] for result in found):
        dump, restore = seen["messages"]
        assert "rank 0: FileNotFoundError: The folder of a dump must be on a file system" in dump
        assert "which rank 1 has written" in dump
        assert "All ranks must read the same dump" in restore
        assert seen["kept"] and seen["keys"] == [rank, rank + 2, rank + 4]


def test_paths_with_a_scheme_are_written_where_they_say_or_raise_on_all_ranks(found):
    for rank, seen in enumerate(result["elsewhere"] for result in found):
        ones = {0: [7.0, 1.0], 1: [7.0, 1.0, 1.0]}[rank]
        expected = dict(zip([k for k in range(rank, 6, 2) if k != 4], ones, strict=True))
        assert seen["local"] == seen["by TensorFlow"] == expected
        for message in seen["s3"]:
            assert "rank 0: ValueError" in message and "is registered for 's3'" in message
        assert "must be on a file system that all ranks share" in seen["ram"][0]
        assert all(seen["ram"]) and seen["kept"]


def test_a_shard_that_is_not_seen_as_it_was_written_leaves_the_old_dump(found):
    for seen in (result["unseen"] for result in found):
        for message in seen["messages"]:
            assert (
                "rank 0: ValueError: " in message and ".1-of-2.npz must have the bytes" in message
            )
        assert seen["kept"] and seen["rows"] == [[1.0, 1.0]] * 3


def test_a_restore_that_one_rank_cannot_take_changes_no_rank(found):
    for rank, seen in enumerate(result["uneven"] for result in found):
        assert seen["message"].startswith("ResourceExhaustedError")
        assert "rank 0: table 'uneven' holds at most 2 keys" in seen["message"]
        assert seen["keys"] == [10 + rank] and seen["rows"] == [[5.0, 5.0]]


def test_a_checkpoint_that_one_rank_cannot_take_changes_no_table_of_any_rank(found):
    for rank, seen in enumerate(result["several"] for result in found):
        assert "rank 1: table 'second' holds at most 2 keys" in seen["messages"][0]
        one = [[10 + rank], [[5.0, 5.0]]]
        assert seen["kept"] == ([one, one], 5.0) and seen["same"]


def test_a_rank_that_saves_alone_is_told_what_it_waits_for(found):
    for rank, seen in enumerate(result["alone"] for result in found):
        for message, call in zip(
            seen["messages"],
            ["dump_to_file of table 'trains_on'", "a save of tf.train.Checkpoint"],
            strict=True,
        ):
            assert message.startswith("FailedPreconditionError")
            assert "rank 1: keys of call" in message and "of 'trains_on" in message
            if rank == 0:
                assert f"This rank is in {call}" in message
                assert message.endswith("which all ranks must call")
        assert seen["after"] == 4.0


def test_the_same_in_a_session(found):
    for rank, seen in enumerate(result["graph"] for result in found):
        assert (seen["dumped"], seen["restored"]) == (b"OK", b"OK")
        assert seen["message"].startswith("ResourceExhaustedError")
        assert "rank 0: table 'in_graph' holds at most 2 keys" in seen["message"]
        assert seen["sizes"] == (3 - 2 * rank, 0)
