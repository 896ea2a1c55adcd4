"""The slots of a table's content, by name."""

import numpy as np

from sok_like.table.content import TableContent, nothing, slot_fields, slots_by_name


def test_slots_by_name_and_back():
    rows = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    names = np.array([b"momentum", b"velocity"], object)
    content = TableContent(np.arange(2), rows, rows, names, np.array([1, 2]))
    slots = slots_by_name(content)
    assert {name: slot.tolist() for name, slot in slots.items()} == {
        "momentum": [[1], [4]],
        "velocity": [[2, 3], [5, 6]],
    }
    fields = slot_fields(slots)
    np.testing.assert_array_equal(fields["slot_rows"], rows)
    assert fields["slot_names"].tolist() == names.tolist()
    assert fields["slot_widths"].tolist() == [1, 2]


def test_a_table_without_slots():
    assert slots_by_name(nothing(3)) == {}
