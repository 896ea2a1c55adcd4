"""tools/loads_under_way.py on short pieces of machine code, counted by hand."""

import pytest

from tools import loads_under_way

LOAD = "LDG.E.128 R{0}, desc[UR4][R2.64]"
GENERIC_LOAD = "@P1 LD.E.128 R{0}, desc[UR4][R2.64]"


def lines(*instructions):
    """As cuobjdump prints them: an address, the instruction, its bits."""
    return [
        f"        /*{16 * i:04x}*/    {code} ;    /* 0x00 */" for i, code in enumerate(instructions)
    ]


@pytest.mark.parametrize("load", [LOAD, GENERIC_LOAD])
def test_loads_before_the_first_use(load):
    code = lines(*(load.format(r) for r in (8, 12, 16, 20)), "FADD R4, R8, R12")
    assert loads_under_way.most_under_way(code, 128) == 4
    assert loads_under_way.most_under_way(code, 32) == 0


def test_a_value_moved_out_or_stored_is_a_use():
    moved = lines(LOAD.format(8), "MOV R24, R9", LOAD.format(12), "MOV R25, R15", LOAD.format(16))
    stored = lines(LOAD.format(8), "STG.E.128 desc[UR4][R4.64], R8", LOAD.format(12))
    for code in (moved, stored):
        assert loads_under_way.most_under_way(code, 128) == 1


def test_the_next_iteration_does_not_count():
    code = lines(LOAD.format(8), "@P0 BRA 0x0", LOAD.format(12))
    assert loads_under_way.most_under_way(code, 128) == 1
    forward = lines(LOAD.format(8), "@P0 BRA 0x20", LOAD.format(12))
    assert loads_under_way.most_under_way(forward, 128) == 2


def disassembly(loads, absent=None):
    text = ["code for sm_90"]
    for job in loads_under_way.LEAST:
        if job == absent:
            continue
        width = ".128" if "ILi4E" in job else ""
        code = [f"LDG.E{width} R{8 + 4 * i}, [R2.64]" for i in range(loads)]
        text += [f"\t\tFunction : _ZN3sok12OneJobKernelINS_{job}EvT_", *lines(*code)]
    return "\n".join(text)


def test_too_few_loads_and_absent_kernels_fail(capsys):
    assert loads_under_way.report(disassembly(4))
    assert "LESS" not in capsys.readouterr().out
    assert not loads_under_way.report(disassembly(3))
    assert "3  sm_90 OneJobKernel CopyRowsJobILi4ELb0E, LESS THAN 4" in capsys.readouterr().out
    assert not loads_under_way.report(disassembly(4, absent="CopyRowsJobILi4ELb0E"))
    assert "No kernel is called CopyRowsJobILi4ELb0E" in capsys.readouterr().out
