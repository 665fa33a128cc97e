"""Find known faults and slow code of ptxas in the instructions of a compiled kernel."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

_LINE = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@(!?U?P\w+) )?(\S+)\s*([^;&?]*?)\s*(?:[&?].*?)?;",
    re.MULTILINE,
)
"""Address, predicate, name and operands. On sm100 and sm120 cuobjdump of CUDA 12.8 also prints the
waits of each instruction, after ``&`` and ``?``."""
_NO_RESULT = re.compile(
    r"ACQBULK|ARRIVES|BAR|BRA|BREAK|BRX|BSSY|BSYNC|CALL|CCTL|DEPBAR|DSETP|ERRBAR|EXIT|FENCE|FSETP|"
    r"HSETP2|ISETP|KILL|LDGDEPBAR|LDGSTS|MEMBAR|NOP|PLOP3|PREEXIT|R2UR|RED|RET|ST[GLS]?|STSM|SYNCS|"
    r"UTMACCTL|UTMALDG|USETMAXREG|VOTEU|WARPGROUP|WARPSYNC"
)  # instructions without a result in registers of a thread
_OPERAND_REGISTERS = 4  # registers of a thread for an operand of 64 rows by 32 bytes
_FAR = 99  # a number of groups larger than any that is recorded


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembled kernel."""

    address: int
    predicate: str | None
    name: str
    operands: tuple[str, ...]

    @property
    def kind(self) -> str:
        """The name without its modifiers."""
        return self.name.split(".", maxsplit=1)[0]

    @property
    def is_product(self) -> bool:
        """Whether it is an asynchronous product of a warp group on tensor cores."""
        return self.kind.endswith("GMMA")

    def __str__(self) -> str:
        return f"{self.name} {', '.join(self.operands)}"


@lru_cache(maxsize=1)  # every check of a kernel uses the result
def instructions(sass: str) -> tuple[Instruction, ...]:
    """Return the instructions of a disassembled kernel."""
    return tuple(
        Instruction(int(address, 16), predicate or None, name, tuple(re.split(r",\s*", operands)))
        for address, predicate, name, operands in _LINE.findall(sass)
    )


def lost_signs(sass: str) -> list[str]:
    """Return minima and maxima of a sum of two uniform registers, one of them copied for it.

    No kernel computes a sum of this kind. ptxas 12.8 has made it from a difference.
    """
    copied: set[str] = set()
    found = []
    for line in map(str, instructions(sass)):
        if copy := re.fullmatch(r"(?:IMAD\.U32 (R\d+), RZ, RZ|MOV (R\d+)), UR\d+", line):
            copied.add(copy[1] or copy[2])
            continue
        sum_ = re.match(r"VIADDMNMX\S* R\d+, (R\d+)\S*, UR\d+,", line)
        if sum_ and sum_[1] in copied:
            found.append(line)
        if given := re.match(r"\S+ (R\d+),", line):
            copied.discard(given[1])
    return found


def overwritten_operands(sass: str) -> list[str]:
    """Return the instructions that write a register which a product on Hopper may not have read.

    Products are asynchronous: they may read their operands from registers until a wait. ptxas 12.9
    has reused the registers before the wait (https://github.com/triton-lang/triton/pull/11781).
    """
    code = instructions(sass)
    following = _following(code)
    found: dict[int, str] = {}
    # For each instruction: the registers that earlier products read, and the number of groups of
    # products since then, their own included. With several paths the smallest number counts.
    read: list[dict[int, int] | None] = [None] * len(code)
    entered = {target for targets in following for target in targets} - {0}
    pending = [number for number in range(len(code)) if number not in entered]
    for number in pending:
        read[number] = {}
    while pending:
        number = pending.pop()
        before = read[number] or {}
        if before.keys() & _results(code[number]):
            found[number] = f"{code[number].address:#x} {code[number]}"
        after = _after(code[number], before)
        for target in following[number]:
            known = read[target]
            reached = after if known is None else _either(known, after)
            if reached != known:
                read[target] = reached
                pending.append(target)
    return [found[number] for number in sorted(found)]


def serialized_products(sass: str) -> list[str]:
    """Return all products on Hopper if there is a wait for each before the next one starts.

    ptxas serializes all products of a kernel if the operands of running products do not fit the
    registers of one of its loops. It prints a warning, which Triton does not show. The outputs are
    correct, but the kernel is slower.
    """
    steps = [one for one in instructions(sass) if one.is_product or _under_way(one) is not None]
    waited_for = [
        str(one) for one, then in pairwise(steps) if one.is_product and _under_way(then) == 0
    ]
    return waited_for if len(waited_for) == sum(one.is_product for one in steps) else []


def _under_way(instruction: Instruction) -> int | None:
    """Return the number of groups that a wait leaves running; None for another instruction."""
    is_wait = instruction.name.startswith("WARPGROUP.DEPBAR")
    return int(instruction.operands[-1], 16) if is_wait else None


def _after(instruction: Instruction, read: dict[int, int]) -> dict[int, int]:
    """Return the registers that products may still read after an instruction."""
    if instruction.is_product:
        read = read | dict.fromkeys(_operand(instruction), 0)
        if "gsb0" in instruction.operands:  # ends a group
            read = {register: groups + 1 for register, groups in read.items()}
    elif (under_way := _under_way(instruction)) is not None:
        read = {register: groups for register, groups in read.items() if groups <= under_way}
    return read


def _either(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    """Return the registers of both, each with its smaller number of groups."""
    return {
        register: min(one.get(register, _FAR), other.get(register, _FAR))
        for register in one.keys() | other.keys()
    }


def _operand(product: Instruction) -> Iterator[int]:
    """Yield the registers of a product's first operand, which may be in shared memory instead."""
    operand = re.fullmatch(r"R(\d+)(?:\.reuse)?", product.operands[1])
    if operand and product.operands[2].startswith("gdesc"):
        yield from range(int(operand[1]), int(operand[1]) + _OPERAND_REGISTERS)


def _results(instruction: Instruction) -> set[int]:
    """Return the registers that an instruction writes."""
    if _NO_RESULT.fullmatch(instruction.kind):
        return set()
    for operand in instruction.operands[:2]:
        if re.fullmatch(r"!?U?P(T|\d)", operand):
            continue
        if register := re.fullmatch(r"R(\d+)", operand):
            first = int(register[1])
            return set(range(first, first + _width(instruction)))
        break
    return set()


def _width(instruction: Instruction) -> int:
    """Return the number of registers that an instruction writes."""
    kind, modifiers = instruction.kind, instruction.name.split(".")[1:]
    if instruction.is_product:
        columns = re.search(r"64x(\d+)x", instruction.name)
        assert columns is not None, instruction
        return int(columns[1]) // 2
    if kind == "LDSM":
        return int(modifiers[-1]) if modifiers[-1] in {"2", "4"} else 1
    if "128" in modifiers:
        return 4
    is_pair = "64" in modifiers or "WIDE" in modifiers
    return 2 if is_pair or (kind == "CS2R" and "32" not in modifiers) else 1


def _following(code: tuple[Instruction, ...]) -> list[list[int]]:
    """Return for each instruction the numbers of the instructions that may follow it."""
    at = {instruction.address: number for number, instruction in enumerate(code)}
    following: list[list[int]] = []
    for number, instruction in enumerate(code):
        targets = [number + 1]
        is_sure = instruction.predicate in {None, "PT"}
        if instruction.kind == "BRA":
            target = at[int(re.findall(r"0x([0-9a-f]+)", instruction.operands[-1])[-1], 16)]
            is_sure = is_sure and len(instruction.operands) == 1 and "DIV" not in instruction.name
            targets = [target] if is_sure else [target, number + 1]
        elif instruction.kind in {"EXIT", "RET", "BRX"} and is_sure:
            targets = []
        following.append([target for target in targets if target < len(code)])
    return following
