"""Compiled kernels round as rules S-5, S-11 and S-12 need: what is not listed is refused."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest

from paged_mla_optimized.config.architectures import SHARED_MEMORY
from paged_mla_optimized.tools import aot
from paged_mla_optimized.tools.arithmetic import ALLOWED, arithmetic_of, main, table, unlisted

WGMMA = "wgmma.mma_async.sync.aligned"
PAGE = Path(__file__).parents[1] / "docs" / "arithmetic.md"


def job(kernel, dtype, scales="inline"):
    function = SimpleNamespace(fn=SimpleNamespace(__name__=kernel))
    return SimpleNamespace(kernel=function, dtype=dtype, constants={"SCALES": scales, "R": [512]})


def refused(name, *, arch="sm90", kernel="attend_kernel", dtype="bf16", scales="inline"):
    """Return whether a kernel may not hold an instruction."""
    return unlisted(f"\t{name} \t%f1, %f2, %f3;\n", job(kernel, dtype, scales), arch) == [name]


def test_the_page_has_the_table_of_the_code(tmp_path):
    """S-11, S-12: what users read is what compilations are held against."""
    assert PAGE.read_text().endswith("\n\n" + table())
    copy = tmp_path / "page.md"
    copy.write_text(PAGE.read_text()[: -len(table())] + table()[:200])
    assert main(["--page", str(copy)]) == 0
    assert copy.read_text() == PAGE.read_text()


def test_a_page_that_does_not_exist_is_named(tmp_path, capsys):
    missing = tmp_path / "missing.md"
    with pytest.raises(SystemExit):
        main(["--page", str(missing)])
    assert f"--page: got {missing}; allowed: an existing file" in capsys.readouterr().err
    assert not missing.exists()


LISTED = [
    ("cvt.u64.u32", "sm80", "schedule_kernel", "i32"),
    ("cvt.f64.f32", "sm80", "append_kernel", "fp32"),
    ("cvt.rn.bf16x2.f32", "sm80", "append_kernel", "bf16"),
    ("cvt.rn.satfinite.e4m3x2.f32", "sm90", "append_fp8_kernel", "bf16"),
    ("cvt.rn.f16x2.e4m3x2", "sm89", "gather_kernel", "fp16"),
    ("cvt.bf16.f16", "sm100", "attend_kernel", "bf16"),
    ("cvt.rn.f32.s32", "sm120", "combine_kernel", "fp32"),
    ("cvt.rpi.ftz.f32.f32", "sm90", "decode_tile_kernel", "bf16"),
    ("fma.rn.f32", "sm86", "quantize_kernel", "fp16"),
    ("fma.rn.f64", "sm86", "rotate_kernel", "fp32"),
    ("mul.f16x2", "sm80", "gather_kernel", "fp16"),
    ("div.rn.f32", "sm89", "append_tokens_kernel", "bf16"),
    ("ex2.approx.ftz.f32", "sm89", "attend_kernel", "bf16"),
    (f"{WGMMA}.m64n256k16.f32.f16.f16", "sm90", "decode_tile_kernel", "fp16"),
    (f"{WGMMA}.m64n32k8.f32.tf32.tf32", "sm90", "attend_kernel", "fp16"),
    (
        f"{WGMMA}.m64n64k32.f32.e4m3.e4m3",
        "sm90",
        "decode_tile_fp8_kernel",
        "bf16",
    ),
    ("setp.lt.f32", "sm80", "attend_kernel", "fp32"),
]


def test_every_line_of_the_table_allows_something():
    """S-11: no pattern is misspelled."""
    for (name, arch, kernel, dtype), allowed in zip(LISTED, ALLOWED, strict=True):
        assert not refused(name, arch=arch, kernel=kernel, dtype=dtype)
        assert allowed.allows(name, job(kernel, dtype), arch)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("cvt.rn.satfinite.e4m3x2.f16x2", {}),  # the second of two roundings
        ("cvt.rz.f16.f32", {}),
        ("cvt.rn.satfinite.e4m3x2.f32", {"arch": "sm89"}),
        ("cvt.rn.satfinite.e5m2x2.f32", {}),
        ("cvt.rn.ue8m0x2.f32", {}),
        ("cvt.rna.tf32.f32", {}),
        ("cvt.rzi.s32.f32", {}),
        ("cvt.rn.ftz.bf16.f32", {}),
        ("cvt.bf16.f16", {"arch": "sm80"}),
        ("add.ftz.f32", {}),
        ("setp.lt.ftz.f32", {}),
        ("fma.rn.ftz.f32", {"kernel": "append_kernel"}),
        ("ex2.approx.f32", {"kernel": "rotate_kernel"}),
        ("div.full.f32", {"kernel": "quantize_kernel"}),
        ("div.approx.f32", {}),
        ("rcp.approx.ftz.f32", {}),
        ("sqrt.rn.f32", {}),
        ("fma.rn.bf16x2", {}),
        ("add.f16", {}),
        ("red.global.add.f32", {}),
        ("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.noftz.bf16", {"arch": "sm90"}),
        ("cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.tile.bulk_group", {"arch": "sm90"}),
        ("mul.f64", {"dtype": "bf16"}),
        ("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", {"dtype": "fp16"}),
        ("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32", {"dtype": "fp32"}),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", {"dtype": "fp32"}),
        ("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32", {"dtype": "bf16"}),
        (f"{WGMMA}.m64n64k8.f32.tf32.tf32", {"dtype": "fp16", "scales": "none"}),
        (f"{WGMMA}.m64n64k8.f32.tf32.tf32", {"dtype": "fp16", "kernel": "decode_tile_kernel"}),
        (f"{WGMMA}.m64n64k32.f32.e4m3.e4m3", {}),
        ("tcgen05.mma.cta_group::1.kind::tf32", {"arch": "sm100"}),
    ],
)
def test_what_rounds_otherwise_is_refused(name, place):
    """S-5, S-11, S-12: by name, as by architecture, kernel and dtype."""
    assert refused(name, **place)


def test_what_moves_numbers_is_no_arithmetic():
    moves = "ld.global.f32 mov.f32 st.shared.v4.f32 selp.f32 shfl.sync.bfly.b32 cvta.to.global.u64"
    ptx = "".join(f"\t@%p1 {name} \t%f1, %f2; // mul.ftz.f32\n" for name in moves.split())
    assert arithmetic_of(ptx) == set()


def test_inline_assembly_is_read_too():
    """S-11: one line of it has several instructions."""
    line = "{ .reg .b16 a; mov.b32 {low, high}, %r1; cvt.rz.f16.f32 %r2, low;@%p2 add.f16 a, b, c;}"
    assert arithmetic_of(line) == {"cvt.rz.f16.f32", "add.f16"}


def test_every_architecture_reads_and_writes_e4m3_in_one_way():
    """S-11: by an instruction that rounds once, or with integers and none."""
    encode, decode = "cvt.rn.satfinite.e4m3x2.f32", "cvt.rn.f16x2.e4m3x2"
    by_arch = {a: (not refused(encode, arch=a), not refused(decode, arch=a)) for a in SHARED_MEMORY}
    assert by_arch == {
        "sm80": (False, False),
        "sm86": (False, False),
        "sm89": (False, True),
        "sm90": (True, True),
        "sm100": (True, True),
        "sm120": (True, True),
    }


def test_every_product_of_matrices_names_its_precision():
    """S-5: Triton's default rounds float32 operands to tf32."""
    kernels = Path(aot.__file__).parents[1] / "kernels"
    products = [
        node
        for path in kernels.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "tl.dot"
    ]
    assert products
    for product in products:
        assert "input_precision" in {keyword.arg for keyword in product.keywords}
