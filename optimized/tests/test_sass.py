"""What ptxas may not do is found in instructions, here in a few that are written down."""

import pytest

from paged_mla_optimized.tools.sass import (
    instructions,
    lost_signs,
    overwritten_operands,
    serialized_products,
)

LOST = """
/*0000*/ IMAD.U32 R80, RZ, RZ, UR32 ;
/*0010*/ {between} ;
/*0020*/ VIADDMNMX R80, R80, UR49, R97, PT ;
"""
PRODUCT = "HGMMA.64x64x16.F32.BF16 R24, R56, gdesc[UR8], R24"
ENDS = f"{PRODUCT}, gsb0"
ALL, ALL_BUT_ONE = (f"WARPGROUP.DEPBAR.LE gsb0, {left}" for left in ("0x0", "0x1"))


def code(*lines):
    """Return instructions as cuobjdump lists them, 16 bytes each."""
    return "".join(f"        /*{at * 16:04x}*/    {line} ;\n" for at, line in enumerate(lines))


@pytest.mark.parametrize(("between", "count"), [("NOP", 1), ("IMAD.MOV R80, RZ, RZ, -R80", 0)])
def test_what_ptxas_makes_of_a_difference_is_found(between, count):
    assert len(lost_signs(LOST.format(between=between))) == count


def test_what_an_instruction_waits_for_is_no_operand():
    """cuobjdump of CUDA 12.8 lists it behind the operands, on sm100 and sm120."""
    waits = " &req={4,3,2,0} &wr=0x1 ?WAIT13_END_GROUP ;"
    assert len(lost_signs(LOST.format(between="NOP").replace(" ;", waits))) == 1
    branch, moved = instructions(code("@P0 BRA 0x10", "MOV R1, R2").replace(" ;", waits))
    assert branch.operands == ("0x10",)
    assert moved.operands == ("R1", "R2")
    loop = code("MOV R1, R2", "@P0 BRA 0x0", "EXIT").replace(" ;", waits)
    assert overwritten_operands(loop) == []


@pytest.mark.parametrize(
    "writes",
    [
        "MOV R56, R2",
        "MOV R59, R2",
        "LDS.64 R58, [R2]",
        "LDS.128 R53, [R2]",
        "LDG.E.64 R55, desc[UR4][R2.64]",
        "LDSM.16.M88.4 R56, [R2]",
        "IMAD.WIDE R58, R2, R3, R4",
        "CS2R R56, SRZ",
        "@!P0 FADD R57, R2, R3",
        "SHFL.BFLY PT, R56, R2, 0x1, 0x1f",
        "HGMMA.64x16x16.F32.BF16 R56, gdesc[UR12], R56",
    ],
)
def test_an_operand_that_is_overwritten_is_found(writes):
    """By one of the registers that a product reads, as far as an instruction writes."""
    [found] = overwritten_operands(code(ENDS, writes, ALL))
    assert found.startswith("0x10 ")
    assert overwritten_operands(code(ENDS, ALL, writes)) == []


@pytest.mark.parametrize(
    "harmless",
    [
        "MOV R55, R56",
        "MOV R60, R56",
        "LDS.128 R60, [R56]",
        "STS [R2], R56",
        "ISETP.GE.AND P0, PT, R56, RZ, PT",
        "FADD R2, R56, R57",
        "R2UR UR4, R56",
    ],
)
def test_operands_may_be_read(harmless):
    assert overwritten_operands(code(ENDS, harmless, ALL)) == []


def test_operands_in_shared_memory_are_no_registers():
    product = "HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"
    assert overwritten_operands(code(product, "MOV R56, R2", ALL)) == []


def test_a_wait_is_for_all_groups_but_some():
    """Two products of one group, one of the next: a wait for all but one leaves this running."""
    other = ENDS.replace("R56", "R60")
    groups = (PRODUCT, PRODUCT.replace("R56", "R64") + ", gsb0", other, ALL_BUT_ONE)
    for written, count in ((56, 0), (64, 0), (60, 1)):
        assert len(overwritten_operands(code(*groups, f"MOV R{written}, R2"))) == count


def test_a_product_whose_group_goes_on_is_not_waited_for():
    assert len(overwritten_operands(code(PRODUCT, ALL, "MOV R56, R2"))) == 1


def test_the_next_turn_of_a_loop_is_looked_at():
    """What a turn leaves running, the next one may overwrite."""
    loop = ("MOV R56, R2", ENDS, "@P0 BRA 0x0", "EXIT")
    assert overwritten_operands(code(*loop)) == ["0x0 MOV R56, R2"]
    assert overwritten_operands(code(*loop[:2], ALL, *loop[2:])) == []


def test_every_way_to_an_instruction_counts():
    """One that waited does not hide one that did not."""
    ways = (ENDS, "@P0 BRA 0x30", ALL, "MOV R56, R2", "EXIT")
    assert overwritten_operands(code(*ways)) == ["0x30 MOV R56, R2"]
    assert overwritten_operands(code(ENDS, "BRA 0x30", "MOV R56, R2", ALL, "EXIT")) == []


@pytest.mark.parametrize(
    ("lines", "count"),
    [
        pytest.param((ENDS, ALL, "NOP", ENDS, ALL), 2, id="each-waited-for"),
        pytest.param((ENDS, ENDS, ALL), 0, id="two-groups"),
        pytest.param((PRODUCT, ENDS, ALL), 0, id="one-group-of-two"),
        pytest.param((ENDS, ALL_BUT_ONE, ENDS, ALL), 0, id="one-left-under-way"),
        pytest.param(("NOP",), 0, id="no-products"),
    ],
)
def test_products_that_wait_for_each_other_are_found(lines, count):
    assert len(serialized_products(code(*lines))) == count
