"""What a dump may not be, whatever its checksums say, and what is refused before it costs much."""

import hashlib
import itertools
import time
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from sok_like.saving.format import array_files, checksums, shard_file
from sok_like.saving.format import manifest as manifest_file
from sok_like.table.content import TableShard
from tests.checks.files import flipped
from tests.saving import fuzz, in_memory, wrong_content


@pytest.mark.parametrize("size", [0, 1, checksums.BLOCK, 9 * checksums.BLOCK + 77])
def test_the_order_of_writing_changes_no_checksum(tmp_path, size):
    """Written in any order and cut anywhere, each block has the CRC-32 that zlib computes."""
    random_state = np.random.default_rng(size)
    data, checksum = random_state.bytes(size), checksums.RunningChecksum()
    cuts = sorted({0, size, *random_state.integers(0, size + 1, 20).tolist()})
    for begin, end in random_state.permutation(list(itertools.pairwise(cuts))).tolist():
        checksum.add(begin, memoryview(data)[begin:end])
    (tmp_path / "a").write_bytes(data)
    blocks = [data[at : at + checksums.BLOCK] for at in range(0, size, checksums.BLOCK)]
    expected = np.asarray([zlib.crc32(block) for block in blocks], "<u4")
    assert checksum.checksum(size) == hashlib.sha256(expected.tobytes()).hexdigest()
    assert checksums.of_file(str(tmp_path / "a")) == checksum.checksum(size)
    for begin in cuts[:-1]:
        assert checksum.crc(begin, size) == zlib.crc32(data[begin:])


def test_a_file_larger_than_its_parts_is_read_by_numpy_and_any_changed_byte_is_found(tmp_path):
    size, dim = 2**18, 24
    keys = np.arange(size, dtype=np.int64) * 3
    rows = np.random.default_rng(0).standard_normal((size, dim)).astype(np.float32)
    shard = TableShard(keys, rows, rows[:, :1], ["momentum"], [1])
    assert rows.nbytes > shard_file.CHUNK_BYTES > checksums.BLOCK
    entry = shard_file.write_shard(tmp_path, "a.npz", shard)
    path = tmp_path / "a.npz"
    with np.load(path) as arrays:
        np.testing.assert_array_equal(arrays["rows"], rows)
        np.testing.assert_array_equal(arrays["keys"], keys)
        np.testing.assert_array_equal(arrays["slot_rows"], rows[:, :1])
    back = shard_file.ShardFile(path, dim, entry).part(0, size)
    np.testing.assert_array_equal(back.rows, rows)
    wrong = r"a\.npz must be a whole.*checksum that differs"
    for at in (0, 50, 2**20, 2**20 - 1, 2**24 + 5, entry["bytes"] - 1):
        with flipped(path, at), pytest.raises(ValueError, match=wrong):
            shard_file.ShardFile(path, dim, entry)
    # Between two parts that are read one after the other.
    step = shard_file.CHUNK_BYTES // 8
    keys = np.arange(step + 9)
    keys[step] = keys[step - 1]
    rows = np.zeros([len(keys), 1], np.float32)
    entry = shard_file.write_shard(tmp_path, "b.npz", TableShard(keys, rows, rows[:, :0], [], []))
    file = shard_file.ShardFile(tmp_path / "b.npz", 1, entry)
    file.keys(0, step)
    with pytest.raises(ValueError, match=r"b\.npz must hold each key once"):
        file.keys(step, step + 9)


def test_positions_beyond_4_gib_are_what_zip_files_have(tmp_path):
    layout = array_files.Layout({"a": ((2**29 + 3,), np.int64), "b": ((5,), np.int64)})
    path = tmp_path / "a.npz"
    with path.open("wb") as file:  # with a hole of 4 GiB, which takes no space
        small = layout.npy_headers[1][1] + bytes(40)

        def crc(begin, end):
            return zlib.crc32(small) if end - begin == len(small) else 0

        for at, header in [*layout.npy_headers, *layout.zip_headers(crc)]:
            file.seek(at)
            file.write(header)
    with zipfile.ZipFile(path) as archive:
        sizes = {info.filename: (info.file_size, info.header_offset) for info in archive.filelist}
        assert [*sizes] == ["a.npy", "b.npy"] and sizes["a.npy"] == (8 * (2**29 + 3) + 128, 0)
        assert sizes["b.npy"][1] > 2**32 and archive.read("b.npy") == small


def test_a_manifest_far_too_long_for_its_folder_is_not_read(tmp_path):
    fuzz.write_dump(tmp_path, [fuzz.make_shard(0, 1, False)])
    wrong_content.change_manifest(
        tmp_path, lambda fields: fields["shards"].extend(fields["shards"] * 60_000)
    )
    assert sum(path.stat().st_size for path in tmp_path.glob("*.json")) > 2 * 2**20
    begin = time.perf_counter()
    tracemalloc.start()
    try:
        for read in (fuzz.read_dump, manifest_file.only_table):
            with pytest.raises(ValueError, match=r"json must be a manifest.*a folder of 2 files"):
                read(tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - begin < 2


def test_the_longest_names_fit_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(manifest_file, "check_seen", lambda *_: None)  # files of 2**50 bytes
    for table in ("é" * 30_000, "\U0001f600" * 20_000, '"\\' * 9_000):
        names = [manifest_file.shard_name(table, "1" * 16, rank, 40) for rank in range(40)]
        entries = [
            {"file": name, "bytes": 2**50, "checksum": "f" * 64, "keys": 2**50} for name in names
        ]
        for name in names:
            (tmp_path / name).write_bytes(b"")
        head = manifest_file.Head(table, 4, "int64", "1" * 16)
        manifest_file.write_manifest(tmp_path, head, entries, 2**60, [])
        assert len(manifest_file.read_manifest(tmp_path, table, 4).files) == 40
        (path,) = tmp_path.glob("*.json")
        path.unlink()


@pytest.mark.parametrize("kind", ["different", "alternating"])
def test_far_more_steps_than_keys_are_refused_at_once(tmp_path, kind):
    """500,000 runs of steps for some keys took 49 s to replay."""
    delta = fuzz.make_shard(0, 1, False)
    for field in ("keys", "rows", "slot_rows"):
        setattr(delta, field, getattr(delta, field)[:2])
    delta.erased, delta.optimizer = delta.keys[:0], "adam(beta_1=0.9, beta_2=0.999, epsilon=1e-07)"
    delta.steps = np.ones([500_000, 3])
    delta.steps[:, 2] = np.arange(1, 500_001)
    delta.steps[:, 1] = 1 / delta.steps[:, 2]
    if kind == "alternating":
        delta.steps[::2] = 0
    more = in_memory.write_shards(tmp_path, [delta], "t", "d")
    chain = [{"dump": "d", "since": "b", "step": 1, "shards": more}]
    in_memory.write_dump(tmp_path, [fuzz.make_shard(0, 1, False)], "t", fuzz.DIM, "b", 1, chain)
    begin = time.process_time()
    with pytest.raises(ValueError, match=r"npz must log at most \d+ runs.*for 602 keys.*500000"):
        in_memory.read_dump(tmp_path, "t", fuzz.DIM)
    assert time.process_time() - begin < 2
