"""The arguments that a launch passes to Triton's C launcher, and when Triton launches by itself.

Triton's own launcher is built here, with a C launcher that takes notes.
"""

from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton.backends.nvidia import driver as nvidia
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime.driver import driver

from paged_mla_optimized import DraftSteps, merge_partials
from paged_mla_optimized.runtime import launch
from paged_mla_optimized.runtime.kernel_spec import KernelSpec
from paged_mla_optimized.runtime.launch import Descriptors, Fixed, Launcher
from paged_mla_optimized.triton_compat import c_launcher

STREAM, FUNCTION, METADATA = 11, 22, (4, 1, 1024)
LAYOUT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
DESCRIPTOR_TYPES = {
    "wide_desc": "tensordesc<bf16[64, 128]>",
    "slim_desc": "tensordesc<bf16[8, 64]>",
}
FORMS = [
    {"swizzle": 3, "elem_size": 2, "elem_type": 9, "block_size": box, "fp4_padded": False}
    for box in ([64, 128], [8, 64])
]
CACHE = torch.zeros(32, 576, dtype=torch.bfloat16)


class Notes:
    """Replaces the C launcher, its encoder of tensor maps, and the current device."""

    def __init__(self):
        self.launches = []
        self.encoded = []
        self.device = -1  # a CPU's
        self.devices = []  # of each launch
        self.exchanges = 0

    def __call__(self, *arguments):
        self.launches.append(plain(arguments))
        self.devices.append(self.device)

    def exchange(self, device):
        self.exchanges += 1
        before = self.device
        self.device = before if device < 0 else device
        return before

    def encode(self, *arguments):
        self.encoded.append(arguments)
        return "map", *map(plain, arguments)


def plain(value):
    """Return addresses in place of tensors, and tuples in place of lists."""
    if isinstance(value, torch.Tensor):
        return value.data_ptr()
    return tuple(map(plain, value)) if isinstance(value, (list, tuple)) else value


@pytest.fixture
def notes(monkeypatch):
    """Take the place of the device's driver and of what Triton compiles in C."""
    notes = Notes()
    utils = SimpleNamespace(
        launch=notes,
        build_signature_metadata=tuple,
        fill_tma_descriptor=notes.encode,
        fill_tma_descriptor_tiled=notes.encode,
    )
    active = SimpleNamespace(
        utils=utils,
        get_current_device=lambda: notes.device,
        get_current_stream=lambda device: STREAM + device + 1,
    )
    monkeypatch.setattr(driver, "_active", active)
    monkeypatch.setattr(torch.cuda, "_exchange_device", notes.exchange)
    monkeypatch.setattr(torch.cuda, "_maybe_exchange_device", notes.exchange)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: utils, raising=False)
    monkeypatch.setattr(nvidia, "PyKernelArg", lambda **kinds: kinds, raising=False)
    return notes


class Kernel:
    """Launches as ``JITFunction`` does, with Triton's own launcher; counts how often."""

    def __init__(self, *, with_descriptors=False, scratch=0, of_any_alignment=(), records=()):
        types = {"q_ptr": "*bf16", "out_ptr": "*bf16"} | dict(records)
        types |= {"stride": "i32", "scale": "fp32"}
        types |= DESCRIPTOR_TYPES if with_descriptors else {}
        types |= {"TILE": "constexpr"}
        self.arg_names = list(types)
        self.types = dict(records)
        self.params = [
            SimpleNamespace(
                name=name,
                do_not_specialize=False,
                do_not_specialize_on_alignment=name in of_any_alignment,
            )
            for name in types
        ]
        self.searches = 0
        metadata = SimpleNamespace(
            tensordesc_meta=FORMS if with_descriptors else [],
            global_scratch_size=scratch,
            global_scratch_align=16,
            profile_scratch_size=0,
            profile_scratch_align=1,
            launch_cooperative_grid=False,
            launch_pdl=True,
        )
        self.binary = SimpleNamespace(
            run=nvidia.CudaLauncher(SimpleNamespace(signature=types), metadata),
            function=FUNCTION,
            packed_metadata=METADATA,
        )

    def __getitem__(self, grid):
        def launch_as_triton_does(*arguments, TILE, num_warps, enable_fp_fusion):
            assert num_warps == 4
            assert enable_fp_fusion
            self.searches += 1
            stream = driver.active.get_current_stream(driver.active.get_current_device())
            given = (stream, FUNCTION, METADATA, None, None, None, *arguments, TILE)
            self.binary.run(*grid, *given)
            return self.binary

        return launch_as_triton_does


def descriptors():
    """Return two boxes of one cache."""
    boxes = (form["block_size"] for form in FORMS)
    return Descriptors(*(TensorDescriptor.from_tensor(CACHE, box, LAYOUT) for box in boxes))


class OnSecond(torch.Tensor):
    """A tensor that reports the second of two GPUs as its device."""

    def get_device(self):
        return 1


def spec_of(kernel):
    """Return what the kernel is launched with."""
    return KernelSpec(kernel, {"TILE": 64}, kernel.types, {"num_warps": 4})


def launch_twice(kernel, *described, records=(), grid=(5, 2, 1), cluster=1, kind=torch.Tensor):
    """Launch with Triton's eyes, then with what was remembered."""
    launcher = Launcher(spec_of(kernel), cluster=cluster)
    q, out = torch.zeros(2, 8, 64, dtype=torch.bfloat16).as_subclass(kind)
    for _ in range(2):
        launcher(grid, ("strides", 64), q, out, *records, 64, 0.5, *described)


@pytest.mark.parametrize("with_descriptors", [False, True], ids=["plain", "descriptors"])
def test_the_c_launcher_gets_what_triton_gives_it(notes, with_descriptors):
    """A start without Triton's search means the same launch, argument by argument."""
    kernel = Kernel(with_descriptors=with_descriptors)
    launch_twice(kernel, *([descriptors()] if with_descriptors else []))
    assert kernel.searches == 1
    by_triton, by_us = notes.launches
    assert by_us == by_triton
    assert by_us[:5] == (5, 2, 1, STREAM, FUNCTION)


class Lines(NamedTuple):
    """A record of arguments."""

    ptr: object
    stride: object


class Tables(NamedTuple):
    """A record of what a kernel may be compiled without."""

    cos_ptr: object
    sin_ptr: object


RECORDS = {
    "lines": Lines("*bf16", "i32"),
    "fixed": Lines("*bf16", "*fp32"),
    "tables": Tables("*fp32", "*fp32"),
    "absent": Tables("constexpr", "constexpr"),
}


def test_records_are_handed_on_as_tuples(notes):
    """Triton and its C launcher get tuples, and None for what a kernel is compiled without."""
    kernel = Kernel(with_descriptors=True, records=RECORDS)
    x = torch.zeros(64, dtype=torch.bfloat16)
    tables = (x, torch.zeros(8))
    records = ((x, 3), Fixed(Lines(*tables)), tables, Tables(None, None))
    launch_twice(kernel, descriptors(), records=records)
    by_triton, by_us = notes.launches
    assert kernel.searches == 1
    assert by_us == by_triton
    assert f"({x.data_ptr()}, 3), ({x.data_ptr()}, " in str(by_us)
    assert "(None, None), 64, 0.5, ('map'" in str(by_us)


@pytest.mark.usefixtures("notes")
@pytest.mark.parametrize("name", ["lines", "fixed", "tables"])
def test_alignment_counts_in_records(name):
    """Triton specialises on every field of a record."""
    x = torch.zeros(128, dtype=torch.bfloat16)
    kernel = Kernel(records={name: RECORDS[name]})
    launcher = Launcher(spec_of(kernel))
    for start, searches in ((0, 1), (8, 1), (1, 2), (0, 2)):
        lines = {"lines": (x[start:], 3), "tables": (x, x[start:])}
        record = lines[name] if name in lines else Fixed(Lines(x, x[start:]))
        launcher((1, 1, 1), (64,), x, x, record, 64, 0.5)
        assert kernel.searches == searches


class Tile(NamedTuple):
    """A record of constants."""

    rows: object
    kind: object


def test_records_of_constants_are_wrapped_for_triton(notes):
    """Triton's launch knows a constant in a record by its wrapper; the C launcher does not care."""
    kernel = Kernel()
    spec = KernelSpec(kernel, {"TILE": Tile(64, "even")}, options={"num_warps": 4})
    x = torch.zeros(128, dtype=torch.bfloat16)
    launcher = Launcher(spec)
    for _ in range(2):
        launcher((1, 1, 1), (64,), x, x, 64, 0.5)
    assert [type(one) for one in spec.launched["TILE"]] == [tl.constexpr] * 2
    assert spec.flat_constants == {"rows": 64, "kind": "even"}
    assert "(64, 'even')" in str(notes.launches[1])


def test_clusters_are_all_that_differs(notes):
    """Triton's C launcher takes the grid in clusters; Triton itself starts without."""
    launch_twice(Kernel(), grid=(6, 2, 1), cluster=2)
    by_triton, by_us = notes.launches
    assert by_triton[:3] == (6, 2, 1)
    rest = [(4, 2, 1024) if argument == METADATA else argument for argument in by_triton[1:]]
    assert list(by_us) == [3, *rest]


def test_descriptors_are_encoded_once(notes):
    """Two tensor maps for Triton's launch, two for every launch after it."""
    kernel = Kernel(with_descriptors=True)
    both = descriptors()
    launch_twice(kernel, both)
    launch_twice(kernel, both)
    by_triton = 2 * 2
    assert len(notes.encoded) == by_triton + 2


def test_descriptors_follow_the_binary(notes):
    """A binary that wants another form never gets the maps of the one before."""
    both = descriptors()
    other = tuple(form | {"swizzle": 2} for form in FORMS)
    first, second = both.arguments(tuple(FORMS)), both.arguments(other)
    assert [arguments[1] for arguments in notes.encoded] == [3, 3, 2, 2]
    assert first != second
    assert both.arguments(None) == both.descriptors


@pytest.mark.parametrize("version", ["3.5", "3.10"])
def test_an_unknown_triton_launches_itself(notes, monkeypatch, version):
    """Where the order of a launcher's arguments is not known, every launch is Triton's own."""
    monkeypatch.setattr(launch, "KNOWS_C_LAUNCHER", c_launcher.is_known(version))
    kernel = Kernel(with_descriptors=True)
    launch_twice(kernel, descriptors(), grid=(6, 2, 1), cluster=2)
    assert kernel.searches == 2
    assert notes.launches[0] == notes.launches[1]


def test_scratch_memory_is_left_to_triton(notes, monkeypatch):
    """Triton's own launcher allocates it, at each launch."""
    allocated = []
    allocator = SimpleNamespace(get=lambda: lambda *request: allocated.append(request) or 4096)
    monkeypatch.setattr(nvidia._allocation, "_allocator", allocator)
    kernel = Kernel(scratch=16)
    launch_twice(kernel)
    assert kernel.searches == 1
    assert allocated == [(5 * 2 * 16, 16, STREAM)] * 2
    assert notes.launches[0] == notes.launches[1]


@pytest.mark.parametrize(
    ("key", "offset", "searches"),
    [((64,), 0, 1), ((72,), 0, 2), ((64,), 1, 2), ((64,), 8, 1)],
    ids=["same", "other-strides", "misaligned", "aligned-elsewhere"],
)
def test_what_triton_specialises_on_is_looked_at(notes, key, offset, searches):
    """Other strides or an odd address never start a binary that was compiled for these."""
    kernel = Kernel()
    launcher = Launcher(spec_of(kernel))
    q, out = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    launcher((1, 1, 1), (64,), q, out, 64, 0.5)
    launcher((1, 1, 1), key, q[offset:], out, 64, 0.5)
    assert kernel.searches == searches
    assert str(q[offset:].data_ptr()) in str(notes.launches[1])


@pytest.mark.usefixtures("notes")
def test_alignment_counts_where_triton_specialises_on_it():
    """A pointer that the kernel takes at any address, such as a scale's, is none to look at."""
    kernel = Kernel(of_any_alignment=["out_ptr"])
    launcher = Launcher(spec_of(kernel))
    q, out = torch.zeros(128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    for start in (0, 2, 3):
        launcher((1, 1, 1), (64,), q, out[start:], 64, 0.5)
    assert kernel.searches == 1
    launcher((1, 1, 1), (64,), q[2:], out, 64, 0.5)
    assert kernel.searches == 2


def test_a_misaligned_binary_is_forgotten(notes):
    """What Triton found for an odd address does not serve an even one."""
    kernel = Kernel()
    launcher = Launcher(spec_of(kernel))
    q = torch.zeros(128, dtype=torch.bfloat16)
    for start in (1, 0, 0):
        launcher((1, 1, 1), (64,), q[start:], q, 64, 0.5)
    assert kernel.searches == 2
    assert len(notes.launches) == 3


@pytest.mark.parametrize("name", ["launch_enter_hook", "launch_exit_hook"])
def test_profilers_see_every_launch(notes, monkeypatch, name):
    """While a hook listens, every launch goes by Triton's own path."""
    kernel = Kernel()
    with monkeypatch.context() as patch:
        patch.setattr(getattr(triton.knobs.runtime, name), "calls", [print])
        launch_twice(kernel)
    assert kernel.searches == 2
    assert len(notes.launches) == 2


@pytest.mark.parametrize("current", [0, 1, 2])
def test_launches_are_on_the_device_of_their_tensors(notes, current):
    """With any current device, which stays the current device."""
    notes.device = current
    kernel = Kernel()
    launch_twice(kernel, kind=OnSecond)
    assert kernel.searches == 1
    assert notes.devices == [1, 1]
    assert [arguments[3] for arguments in notes.launches] == [STREAM + 2] * 2
    assert notes.device == current


def test_the_current_device_is_left_alone_where_it_is_the_right_one(notes):
    """Changing it costs host time: a remembered launch only looks."""
    notes.device = 1
    launch_twice(Kernel(), kind=OnSecond)
    by_triton = 2
    assert notes.exchanges == by_triton


def test_remembered_binaries_are_bounded(notes, monkeypatch):
    """An engine may slice its buffers in ever new ways."""
    monkeypatch.setattr(launch, "MAX_BINARIES", 2)
    kernel = Kernel()
    launcher = Launcher(spec_of(kernel))
    q = torch.zeros(128, dtype=torch.bfloat16)
    for stride in (1, 2, 3, 3, 1):
        launcher((1, 1, 1), stride, q, q, stride, 0.5)
    assert kernel.searches == 4
    assert len(notes.launches) == 5


def unremembered():
    """Return the calls whose kernels Triton launches itself, ready to be made."""
    shape = {"max_requests": 1, "branches": 1, "steps": 1, "prefix_width": 2, "own_width": 1}
    drafts = DraftSteps(**shape, block_size=4, device="cpu")
    rows = (torch.ones(1).int(), torch.zeros(1, 2).int(), torch.ones(1, 1, 1).int())
    return {
        "merge": partial(merge_partials, torch.zeros(2, 1, 1, 4), torch.zeros(2, 1, 1)),
        "drafts": partial(drafts.fill, *rows),
        "tails": partial(drafts.copy_tails, torch.zeros(2, 4, 6), *rows),
    }


@pytest.mark.parametrize("name", ["merge", "drafts", "tails"])
def test_other_launches_ask_for_the_device_of_their_tensors(monkeypatch, name):
    """Triton itself starts a kernel on the current device."""
    call, asked = unremembered()[name], []

    class Device(torch.cuda.device):
        def __init__(self, device):
            asked.append(device)
            super().__init__(-1)

    monkeypatch.setattr(torch.Tensor, "get_device", lambda _tensor: 1)
    monkeypatch.setattr(torch.cuda, "device", Device)
    call()
    assert asked == [1]
