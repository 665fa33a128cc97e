"""The changes of one token that cosmic-ray makes to a file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

# Only the session source_mutation installs cosmic-ray; another session checks types.
from cosmic_ray.ast import ast_nodes, get_ast  # type: ignore[import-not-found]  # installed by its session
from cosmic_ray.mutating import mutate_code  # type: ignore[import-not-found]  # installed by its session
from cosmic_ray.plugins import get_operator  # type: ignore[import-not-found]  # installed by its session

_BINARY = (
    "Add_Sub Sub_Add Mul_Add Div_Mul FloorDiv_Mod Mod_FloorDiv Pow_Mul LShift_RShift "
    "RShift_LShift BitOr_BitAnd BitAnd_BitOr"
)
_COMPARISONS = (
    "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt Is_IsNot IsNot_Is"
)
_UNARY = "Delete_USub Delete_Not Delete_Invert"
_OTHERS = (
    "AddNot ReplaceTrueWithFalse ReplaceFalseWithTrue ReplaceAndWithOr ReplaceOrWithAnd "
    "ReplaceBreakWithContinue ReplaceContinueWithBreak NumberReplacer ZeroIterationForLoop"
)
OPERATORS = (
    *(f"ReplaceBinaryOperator_{name}" for name in _BINARY.split()),
    *(f"ReplaceComparisonOperator_{name}" for name in _COMPARISONS.split()),
    *(f"ReplaceUnaryOperator_{name}" for name in _UNARY.split()),
    *_OTHERS.split(),
)
"""For each operator, the replacements by its opposite and its neighbor."""


@dataclass(frozen=True)
class Change:
    """A change of one line, and the whole source of the file with this change."""

    file: str
    line: int
    was: str
    becomes: str
    source: str

    @property
    def key(self) -> tuple[str, str, str]:
        """The file and both lines, which identify the change in an excuse."""
        return self.file, self.was, self.becomes

    def __str__(self) -> str:
        """Return the change as a diff."""
        return f"{self.file}:{self.line}\n  - {self.was}\n  + {self.becomes}"


def changes_of(file: str, source: str) -> Iterator[Change]:
    """Yield every distinct change of `source`, the text of `file`, that changes the program."""
    seen = {_meaning(source)}
    nodes = list(ast_nodes(get_ast(source)))
    for name in OPERATORS:
        operator = get_operator(f"core/{name}")()
        for occurrence in range(sum(len(list(operator.mutation_positions(n))) for n in nodes)):
            changed = mutate_code(source, operator, occurrence)
            meaning = _meaning(changed)
            if meaning not in seen:
                seen.add(meaning)
                yield _change(file, source, changed)


def _change(file: str, source: str, changed: str) -> Change:
    before, after = source.splitlines(), changed.splitlines()
    at = next(i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b)
    return Change(file, at + 1, before[at].strip(), after[at].strip(), changed)


def _meaning(source: str) -> str:
    """Return the syntax tree of a program as text, without layout and annotations."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg) and not _is_constexpr(node):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Name("Any")
    return ast.dump(tree)


def _is_constexpr(argument: ast.arg) -> bool:
    return argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
