"""Tables against a Python dict, and what their memory and their hashes promise.

Threads, slots and full tables are in cpp/tests/.
"""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
    run_state_machine_as_test,
)

from sok_like import _core

DIM = 3
RANGES = {
    "int64": (-(2**63), 2**63 - 1),
    "int32": (-(2**31), 2**31 - 1),
    "uint64": (0, 2**64 - 1),
    "uint32": (0, 2**32 - 1),
}


def extreme_keys(key_dtype):
    low, high = RANGES[key_dtype]
    wanted = [0, 1, 2, -1, -2, low, low + 1, high, high - 1, 2**31, 2**32, -(2**31), 0x7FFF, 12345]
    return [k for k in dict.fromkeys(wanted) if low <= k <= high]


class TableAgainstDict(RuleBasedStateMachine):
    """Few keys, so that they are inserted, erased and inserted again; batches repeat keys."""

    def __init__(self, core):
        super().__init__()
        self.core = core

    @initialize(data=st.data(), use_slots=st.booleans())
    def start(self, data, use_slots):
        wide = [name for name in RANGES if "64" in name]  # those of a device
        key_dtype = data.draw(st.sampled_from(sorted(RANGES) if self.core is _core else wide))
        self.table = self.core.Table("t", DIM, key_dtype=key_dtype, initializer="constant", a=0.25)
        if use_slots:
            self.table.configure_slots([_core.SlotVariableSpec("m", 2, initial=1.5)])
        self.key_dtype = key_dtype
        extremes = extreme_keys(key_dtype)
        self.universe = extremes + [k for k in range(100, 160) if k not in extremes]
        self.expected = {}
        self.count = 0

    def pick(self, data, max_size=40):
        keys = data.draw(st.lists(st.sampled_from(self.universe), max_size=max_size))
        return keys, np.array(keys, self.key_dtype)

    def check_rows(self, keys, rows):
        initial = np.full(DIM, 0.25, np.float32)
        wanted = [self.expected.get(k, initial) for k in keys]
        np.testing.assert_array_equal(rows, np.array(wanted, np.float32).reshape(-1, DIM))

    @rule(data=st.data())
    def find(self, data):
        keys, array = self.pick(data)
        rows, found = self.table.find(array)
        self.check_rows(keys, rows)
        assert found.tolist() == [k in self.expected for k in keys]

    @rule(data=st.data())
    def find_or_insert(self, data):
        keys, array = self.pick(data)
        rows, inserted = self.table.find_or_insert(array)
        self.check_rows(keys, rows)
        seen = set(self.expected)
        assert inserted.tolist() == [not (k in seen or seen.add(k)) for k in keys]
        for k in keys:
            self.expected.setdefault(k, np.full(DIM, 0.25, np.float32))

    @rule(data=st.data())
    def assign(self, data):
        keys, array = self.pick(data)
        rows = np.zeros((len(keys), DIM), np.float32)
        for i, k in enumerate(keys):
            self.count += 1
            rows[i] = self.expected[k] = self.count + np.arange(DIM, dtype=np.float32)
        self.table.assign(array, rows)

    @rule(data=st.data())
    def erase(self, data):
        keys, array = self.pick(data)
        assert self.table.erase(array) == len(self.expected.keys() & set(keys))
        for k in keys:
            self.expected.pop(k, None)

    @rule()
    def clear(self):
        self.table.clear()
        self.expected.clear()

    @rule(num_keys=st.integers(0, 3000))
    def reserve(self, num_keys):
        self.table.reserve(num_keys)
        assert self.table.capacity >= num_keys

    @rule()
    def export_and_import(self):
        keys, rows, slots = self.table.export()
        assert keys.dtype == self.key_dtype
        assert (np.diff(keys.astype(np.uint64)) > 0).all() or len(keys) < 2
        assert set(keys.tolist()) == set(self.expected)
        self.check_rows(keys.tolist(), rows)
        # Into a table with the same initial rows, in reverse order; it takes this one's place.
        other = self.core.Table("t", DIM, key_dtype=self.key_dtype, initializer="constant", a=0.25)
        other.import_(keys[::-1], rows[::-1], {name: slot[::-1] for name, slot in slots.items()})
        again = other.export()
        for mine, theirs in zip(
            (keys, rows, *slots.values()), (*again[:2], *again[2].values()), strict=True
        ):
            np.testing.assert_array_equal(mine, theirs)
        self.table = other

    @invariant()
    def size(self):
        if hasattr(self, "table"):
            assert len(self.table) == self.table.size == len(self.expected)


def test_table_against_dict(core):
    examples = 60 if core is _core else 15
    run_state_machine_as_test(
        lambda: TableAgainstDict(core),
        settings=settings(max_examples=examples, stateful_step_count=30, deadline=None),
    )


def unhashed(hashes):
    """The keys that `HashKey` of cpp/core/hash.h turns into these: the mix run backwards."""
    with np.errstate(over="ignore"):
        keys = hashes ^ (hashes >> 31) ^ (hashes >> 62)
        keys *= np.uint64(pow(0x94D049BB133111EB, -1, 2**64))
        keys ^= (keys >> 27) ^ (keys >> 54)
        keys *= np.uint64(pow(0xBF58476D1CE4E5B9, -1, 2**64))
        return keys ^ (keys >> 30) ^ (keys >> 60)


def test_keys_made_up_to_share_a_bucket_do_not():
    """Equal hash bits, whichever of them the bucket might be taken from."""
    one = unhashed(np.array([5 << 58 | 77], np.uint64)).view(np.int64)
    assert _core._hash_pieces(int(one[0]))[::2] == (5, 77)
    numbers = np.arange(20_000, dtype=np.uint64)
    for shift in (8, 24, 40):
        keys = unhashed((np.uint64(5) << np.uint64(58)) + (numbers << np.uint64(shift)))
        table = _core.Table("t", 1, key_dtype="uint64")
        table.find_or_insert(keys)
        assert table.stats()["size"] == len(keys)
        assert table.stats()["max_probe_length"] < 500  # of 20,000


def test_hash_pieces_are_even_for_the_keys_of_one_rank():
    """A rank holds keys of one remainder; no part of the hash may depend on it."""
    num_keys = 64 * 1000
    pieces = np.array([_core._hash_pieces(7 + 64 * i, 64) for i in range(num_keys)], np.uint64)
    for values, num_values in ((pieces[:, 0], 64), (pieces[:, 1] % 64, 64), (pieces[:, 2], 256)):
        counts = np.bincount(values.astype(np.int64), minlength=num_values)
        if num_values == 256:
            assert (counts[:2] == 0).all()
            counts = counts[4:]  # 2 and 3 take the two values that 0 and 1 would have had
            num_values = 256
        mean = num_keys / num_values
        assert np.abs(counts - mean).max() < 6 * np.sqrt(mean)
    joint = np.bincount((pieces[:, 0] * 64 + pieces[:, 1] % 64).astype(np.int64), minlength=4096)
    assert joint.max() < 15.6 + 8 * np.sqrt(15.6)


def test_growth_keeps_every_row():
    rng = np.random.default_rng(0)
    keys = rng.permutation(np.unique(rng.integers(-(2**63), 2**63 - 1, 200_000)))
    rows = rng.standard_normal((keys.size, 5), np.float32)
    table = _core.Table("t", 5)
    for begin in range(0, keys.size, 7919):
        table.assign(keys[begin : begin + 7919], rows[begin : begin + 7919])
    np.testing.assert_array_equal(table.find(keys)[0], rows)
    stats = table.stats()
    assert stats["size"] == keys.size <= stats["capacity"]
    assert 3 / 8 * 0.9 < stats["load_factor"] <= 3 / 4
    assert stats["max_probe_length"] >= 1 and stats["mean_probe_length"] < 1.5
    table.clear()
    assert table.stats()["index_bytes"] == 0
    assert not table.find(keys)[1].any()


def test_memory_beside_the_rows_stays_within_32_bytes_a_key():
    table = _core.Table("t", 16)
    keys = np.arange(400_000) * 977
    figures = []
    for begin in range(0, keys.size, 16384):
        table.find_or_insert(keys[begin : begin + 16384])
        stats = table.stats()
        figures.append((stats["bytes"] - stats["size"] * 64) / stats["size"])
    assert np.mean(figures[2:]) <= 32


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_without_hashtable(core, rank):
    options = {"use_hashtable": False, "max_capacity": 10, "rank": rank, "world_size": 3, "seed": 5}
    table = core.Table("t", 4, **options)
    all_keys = np.arange(10) * 3 + rank
    hashed = _core.Table("t", 4, seed=5)
    initial = hashed.initial_rows(all_keys)
    assert table.size == 10
    np.testing.assert_array_equal(table.export()[0], all_keys)
    np.testing.assert_array_equal(table.export()[1], initial)
    rows, found = table.find(all_keys[:4])
    assert found.all()
    np.testing.assert_array_equal(rows, initial[:4])
    assert not table.find_or_insert(all_keys[[5, 5, 1]])[1].any()
    table.assign(all_keys[[2, 2]], [[1] * 4, [2] * 4])
    initial[2] = 2
    np.testing.assert_array_equal(table.find(all_keys)[0], initial)
    np.testing.assert_array_equal(table.export()[1], initial)
    for bad in (-3 + rank, 30 + rank, (rank + 1) % 3, 2**62):
        with pytest.raises(IndexError, match=rf"\[0, 30\).*Received: key {bad} \(table 't'\)"):
            table.find_or_insert([rank, bad])
    with pytest.raises(ValueError, match="use_hashtable=false"):
        table.erase(all_keys)
    table.clear()
    np.testing.assert_array_equal(table.find(all_keys)[0], hashed.initial_rows(all_keys))


def test_wrong_arguments_are_named():
    table = _core.Table("t", 2, key_dtype="int32")
    with pytest.raises(ValueError, match=r"`keys` must fit in int32. Received: 2147483648"):
        table.find(np.array([0, 2**31]))
    with pytest.raises(ValueError, match=r"shape \[num_keys\]. Received shape: \(1, 2\)"):
        table.find([[1, 2]])
    with pytest.raises(ValueError, match="dtype int64.*Received: float64"):
        table.find([1.5])
    with pytest.raises(ValueError, match=r"`rows` must have shape \[2, 2\]. Received.*\(2, 3\)"):
        table.assign([1, 2], np.zeros((2, 3)))
    with pytest.raises(ValueError, match="uint64. Received: -1"):
        _core.Table("t", 1, key_dtype="uint64").find(np.array([-1]))
    assert table.find([])[0].shape == (0, 2)
    for options, message in [
        ({"dim": 0}, "`dim`.*Received: 0"),
        ({"key_dtype": "int8"}, "int8"),
        ({"initializer": "glorot"}, "glorot"),
        ({"a": 1.0, "b": 0.0}, "`a` <= `b`"),
        ({"initializer": "normal", "b": -1.0}, "deviation"),
        ({"max_capacity": -1}, "`max_capacity`"),
        ({"initial_capacity": 9, "max_capacity": 5}, "`initial_capacity`"),
        ({"rank": 2, "world_size": 2}, "`rank`"),
        ({"use_hashtable": False}, "`max_capacity` must be positive"),
        ({"initializer": "default_rows"}, "`default_rows`"),
        ({"initializer": "default_rows", "default_rows": np.zeros((2, 5))}, "`default_rows`"),
    ]:
        with pytest.raises(ValueError, match=message):
            _core.Table("t", **{"dim": 4, **options})


@pytest.mark.parametrize("num_keys", [2_000_000, pytest.param(20_000_000, marks=pytest.mark.slow)])
def test_millions_of_keys(num_keys):
    table, batch = _core.Table("t", 4, initializer="constant", a=0.5), 1 << 20
    for begin in range(0, num_keys, batch):
        keys = np.arange(begin, min(begin + batch, num_keys)) * 1_000_003
        assert table.find_or_insert(keys)[1].all()
    assert table.size == num_keys
    sample = np.random.default_rng(0).integers(0, 2 * num_keys, 1_000_000)
    np.testing.assert_array_equal(table.find(sample * 1_000_003)[1], sample < num_keys)
    assert table.stats()["bytes"] < num_keys * (16 + 34)
