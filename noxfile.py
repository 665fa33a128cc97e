"""The checks of the project, each in its own session; ``nox --list`` describes them."""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent))  # only `python -m nox` adds this folder

from ci.packages import LONGEST_FIRST, PACKAGES, ROOT

nox.needs_version = ">=2025.5"
nox.options.default_venv_backend = "uv|virtualenv"
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True
nox.options.sessions = ["lint", "type", "wheels", "tests"]

ARCHS = ("sm80", "sm86", "sm89", "sm90", "sm100", "sm120")
SAMPLED = ("sm80", "sm90", "sm100", "sm120")
BACKEND = "paged_mla_optimized.backend:create"
RECORDED = "recorded"
TRANSFORMERS = ("transformers==5.17.0", "transformers==5.24.0")
BESIDE_TRANSFORMERS = ("accelerate==1.15.0", "peft==0.21.2", "torchao==0.18.0")
RELEASES = (
    *("vllm==0.25.0", "vllm==0.33.0"),
    *("sglang==0.5.17", "sglang==0.5.23"),
    *TRANSFORMERS,
)
ENGINES = (RECORDED, *RELEASES)  # the oldest supported and the newest tested release of each engine
TRITONS = ("3.6.0", "3.8.0", "3.9.0")  # supported releases in addition to the pinned one
INTERPRETER = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
_FORMS = ".github/ISSUE_TEMPLATE"
SCHEMAS = {  # the files of each schema that check-jsonschema contains
    "github-workflows": (".github/workflows/release.yml",),
    "github-actions": ("action.yml",),
    "github-issue-config": (f"{_FORMS}/config.yml",),
    "github-issue-forms": tuple(
        f"{_FORMS}/{name}.yml" for name in ("bug", "new-kernel", "wrong-verdict")
    ),
    "citation-file-format": ("CITATION.cff",),
}
OF_EVERY_MODE = (  # cases for the interpreter, which is too slow for the whole suite in each mode
    "append-explicit-slots-fp32",
    "append-padded-tokens-fp32",
    "empty-padded-tokens-fp32",
    "replay-decode-extend-decode-fp32",
    "batch_invariant-decode-fp32",
    "batch_invariant-fewer-tokens-than-rows-fp32",
    "prefill-edges-of-keys-fp32",
    "masks-non-causal-short-3-keys-5-queries-fp32",
    "bounded-starts-falling-fp32",
    "bounded-slot-past-32-bits-fp32",
)


def install(session: nox.Session, *packages: str) -> None:
    """Install packages at the versions in constraints.txt; print a line every 10 s."""
    done = threading.Event()
    printing = threading.Thread(target=_print_seconds, args=(done, session.name), daemon=True)
    printing.start()
    try:
        # Python imports, and so compiles, only a few of the installed modules.
        pins = "constraints.txt"
        env = {"UV_BUILD_CONSTRAINT": pins}  # pins hatchling, which builds this repository
        session.install("--no-compile", "-c", pins, *packages, env=env)
    finally:
        done.set()
        printing.join()


def _print_seconds(done: threading.Event, name: str) -> None:
    started = time.monotonic()
    while not done.wait(10):
        print(f"{name}: installing, {time.monotonic() - started:.0f} s", flush=True)


def install_editable(session: nox.Session, extra: str = "", *packages: str) -> None:
    """Install this repository in editable mode, with one of its extras and further packages."""
    install(session, "-e", f".[{extra}]" if extra else ".", *packages)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format, lint, imports, links, words, workflows, and that tests cover each rule."""
    install_editable(session, "", "ruff", "import-linter", "check-jsonschema", "zizmor")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("lint-imports", "--no-cache", "--no-logo")
    session.run("python", "-m", "ci.check_rules")
    session.run("python", "-m", "ci.check_links")
    session.run("python", "-m", "ci.check_words")
    for schema, files in SCHEMAS.items():
        session.run("check-jsonschema", "--builtin-schema", f"vendor.{schema}", *files)
    session.run("zizmor", "--offline", "--no-progress", ".")


@nox.session
def site(session: nox.Session) -> None:
    """Build the documentation site in out/site; a dead link is an error."""
    install(session, "mkdocs-material")
    session.run("python", "-m", "ci.site")


@nox.session(name="type")
def type_(session: nox.Session) -> None:
    """Check types strictly, except in the bodies of Triton kernels."""
    install_editable(session, "conformance,optimized", "mypy", "nox")
    sources = [package.source for package in PACKAGES.values()]
    session.run("mypy", *sources, "noxfile.py", "ci")


@nox.session(reuse_venv=False)
@nox.parametrize(
    "extras",
    [
        nox.param(("", "conformance"), id="suite"),
        nox.param(("optimized", "transformers", "all"), id="kernels"),
    ],
)
def wheels(session: nox.Session, extras: tuple[str, ...]) -> None:
    """Build the wheel, install it with each extra in turn, and import the modules of each extra.

    Then install the suite from the repository's git URL and run it with --quick.
    """
    install(session, "pip")
    folder = session.create_tmp()
    session.run("python", "-m", "ci.check_wheels", folder)
    [wheel] = Path(folder).glob("*.whl")
    for extra in extras:
        install(session, f"paged-mla[{extra}] @ {wheel.resolve().as_uri()}")
        session.run("python", "-m", "ci.check_isolation", extra)
    if "conformance" in extras:
        url = f"git+{ROOT.resolve().as_uri()}"
        install(session, "--force-reinstall", "--no-deps", f"paged-mla[conformance] @ {url}")
        session.run("paged-mla", "conformance", "--quick", "--workers", "1")


@nox.session
@nox.parametrize("package", [nox.param(p, id=p) for p in LONGEST_FIRST])
def tests(session: nox.Session, package: str) -> None:
    """Run the tests of one package."""
    extra = ("pytest", "pytest-xdist", "hypothesis", "jsonschema")
    install_editable(session, PACKAGES[package].extra, *extra)
    if package == "adapters":
        beside = ("apache-tvm-ffi", "docstring-parser", "ninja", "pydantic", "safetensors")
        install(session, *beside)
        install(
            session, "--no-deps", "flashinfer-bench"
        )  # its dependency flashinfer-python needs GPUs
    session.run(
        *("pytest", f"{PACKAGES[package].folder}/tests", "--numprocesses=auto", "--durations=15"),
        *session.posargs,
        env={"OMP_NUM_THREADS": "1"},  # each core already runs a process
    )
    if package == "optimized" and not session.posargs:
        install(session, TRANSFORMERS[-1])  # the tests run every model, absorbed and materialized
        few = "one_piece or lookup or test_hf_projection or assistant or early_exit or pickled"
        session.run("pytest", "optimized/tests_engines", "-k", few, env=INTERPRETER)


@nox.session
def conformance(session: nox.Session) -> None:
    """Run the suite, on a GPU if there is one. Options: --device, --backend, and the suite's."""
    options, rest = _device_options(session)
    _run_suite(session, options.device, options.backend, rest)


@nox.session(default=False)
@nox.parametrize("arch", [nox.param(a, id=a, tags=[a]) for a in ARCHS])
def gpu(session: nox.Session, arch: str) -> None:
    """Run the suite on a GPU of this architecture, which is required, and write its report."""
    found = _gpu_arch()
    if found != arch:
        session.error(f"gpu({arch}) needs an {arch} GPU; found {found or 'none'}")
    _run_suite(session, "gpu", BACKEND, ["--report", f"out/{arch}.json", *session.posargs])


@nox.session(default=False)
@nox.parametrize("arch", [nox.param(a, id=a, tags=[a]) for a in ARCHS])
def compile(session: nox.Session, arch: str) -> None:  # noqa: A001 - the session's name is the command
    """Compile every kernel variant of an architecture (no GPU). Option: --triton VERSION."""
    parser = argparse.ArgumentParser(prog="nox -s compile --")
    parser.add_argument("--triton", help="a Triton release other than the pinned one")
    options, rest = parser.parse_known_args(session.posargs)
    install_editable(session, "optimized")
    if options.triton:
        session.install(f"triton=={options.triton}")
    session.run(
        "python",
        *("-m", "paged_mla_optimized.tools.aot"),
        *("--arch", arch),
        *rest,
    )


@nox.session(default=False)
def fingerprints(session: nox.Session) -> None:
    """List the kernel variants whose fingerprints differ from the committed ones (no GPU)."""
    install_editable(session, "optimized")
    session.run("python", "-m", "paged_mla_optimized.tools.fingerprints", *session.posargs)


@nox.session(default=False)
def compile_sample(session: nox.Session) -> None:
    """Compile a few variants of each kernel for four architectures (no GPU).

    The oldest supported Triton compiles them, because tests use the pinned one. ``nox -s compile``
    compiles every variant for every architecture.
    """
    install_editable(session, "optimized")
    session.install(f"triton=={TRITONS[0]}")
    session.run(
        *("python", "-m", "paged_mla_optimized.tools.aot", "--arch", *SAMPLED, "--sample"),
        *session.posargs,
    )


@nox.session(default=False)
@nox.parametrize("version", [nox.param(v, id=v) for v in TRITONS])
def triton(session: nox.Session, version: str) -> None:
    """Test launches and kernels of each kind with another Triton and its interpreter."""
    install_editable(session, "optimized", "pytest", "pytest-xdist")
    session.install(f"triton=={version}")
    parts = ("test_triton_compat.py", "test_launch.py", "test_cache_keys.py", "test_aot.py")
    session.run(
        *("pytest", *(f"optimized/tests/{name}" for name in parts)),
        *("-k", "not other_launches", "--numprocesses=auto", *session.posargs),
    )
    if version != "3.6.0":  # the interpreter of 3.6.0 needs an older NumPy than the pinned one
        tests = (
            *("test_interpreter.py", "test_conditions.py", "test_append.py", "test_attend.py"),
            "test_plan.py",
        )
        session.run("pytest", *(f"optimized/tests/{name}" for name in tests), *session.posargs)


@nox.session(default=False)
def modes(session: nox.Session) -> None:
    """Test every mode of the Triton backend with the suite; without a GPU, with a few cases."""
    on_gpu = _on_gpu(session, "auto")
    install_editable(session, "conformance,optimized")
    Path("out").mkdir(exist_ok=True)
    few = f"({' or '.join(OF_EVERY_MODE)}) and not fp8"
    chosen = () if on_gpu or session.posargs else ("-k", few)
    session.run(
        *("python", "-m", "ci.run_here", "--modes", "out/mode", *chosen, *session.posargs),
        env={} if on_gpu else INTERPRETER,
    )


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Search for schedules that break a backend. Options: --device, --backend, the search's."""
    options, rest = _device_options(session)
    on_gpu = _on_gpu(session, options.device)
    install_editable(session, "conformance,optimized")
    Path("out").mkdir(exist_ok=True)
    session.run(
        *("paged-mla", "fuzz", "--backend", options.backend),
        *("--folder", "out", *rest),
        env={} if on_gpu else INTERPRETER,
    )


@nox.session(default=False)
def misuse(session: nox.Session) -> None:
    """Call every public function with legal and illegal tensors and arguments, for 60 s."""
    install_editable(session, "conformance,optimized")
    session.run("python", "optimized/tests_misuse", *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(default=False)
@nox.parametrize("engine", [nox.param(name, id=name) for name in ENGINES])
def engines(session: nox.Session, engine: str) -> None:
    """Test the adapters with engines: with recorded interfaces, or with an installed release.

    vLLM and SGLang install the torch that they were built for. With a GPU they generate text too.
    """
    name = engine.split("==", maxsplit=1)[0]
    serves = name in {"vllm", "sglang"}
    needed = "optimized/tests_engines" if name == "transformers" else "optimized/tests/engines"
    if serves:
        session.install("-e", ".[optimized]", "pytest", engine)
    else:
        install_editable(session, "optimized", "pytest")
        if engine != RECORDED:
            session.install(engine)
    beside = BESIDE_TRANSFORMERS if engine == TRANSFORMERS[-1] else ()
    if beside:  # packages that adapt, offload and quantize the models of transformers
        session.install("-c", "constraints.txt", *beside)
    installed = () if engine == RECORDED else (engine, *beside)
    demanded = " ".join(package.split("==")[0] for package in installed)  # tests must not skip them
    session.run(
        *("pytest", needed, *session.posargs), env=INTERPRETER | {"PAGED_MLA_TESTS_NEED": demanded}
    )
    if serves and _on_gpu(session, "auto"):
        session.run("python", "-m", f"paged_mla_optimized.engines.{name}.tools.check")


@nox.session(default=False)
def library_tests(session: nox.Session) -> None:
    """Run transformers' own tests of DeepSeek on a latent pool. Option: its source folder."""
    folder, *rest = session.posargs or ("",)
    if not folder or not Path(folder, "tests/models/deepseek_v3").is_dir():
        given = repr(folder) if folder else "none"
        session.error(f"FOLDER: got {given}; allowed: a checkout of transformers at v5.24.0")
    install_editable(session, "optimized", "pytest")
    install(
        session,
        TRANSFORMERS[-1],
        "accelerate",
        "datasets",
        "httpx",
        "parameterized",
        "pytest-xdist",
    )
    tests = (f"tests/models/deepseek_{version}" for version in ("v2", "v3"))
    chosen = (
        "ModelTest and not export and not pipeline and not matches_sdpa and not IntegrationTest"
    )
    plugin = {"PYTHONPATH": str(ROOT.resolve() / "optimized/tests_engines/of_the_library")}
    session.chdir(folder)
    session.run(
        *("pytest", "-p", "pool_plugin", "-n0", *tests, "-k", chosen, *rest),
        env={**INTERPRETER, **plugin, "HF_HUB_OFFLINE": "1"},
    )


@nox.session(default=False)
def flashmla(session: nox.Session) -> None:
    """Run FlashMLA's own dense decode test on a Hopper GPU. Arguments: a checkout, options."""
    install_editable(session, "optimized")
    session.run("python", "-m", "ci.flashmla", *session.posargs)


@nox.session(default=False)
def mutants(session: nox.Session) -> None:
    """Run the suite on every mutant; a mutant that passes is an error.

    Without arguments the session runs the careless kernels of the adapters too.
    """
    install_editable(session, "conformance,optimized")
    Path("out").mkdir(exist_ok=True)
    summary = ("--summary", "conformance/docs/mutants.md", "--page", "out/mutants.md")
    pages = () if session.posargs else summary
    session.run("python", "-m", "paged_mla_conformance.meta.mutants", *pages, *session.posargs)
    if not session.posargs:
        session.run("python", "-m", "paged_mla_adapters.mutants", *summary[:2])
        page = ("--page", "conformance/docs/mutants.md")
        session.run("python", "-m", "paged_mla_conformance.meta.tolerances", *page)


@nox.session(default=False)
def explained(session: nox.Session) -> None:
    """Explain dumps of mutants, single faults and correct steps; count the right explanations."""
    install_editable(session, "conformance")
    page = () if session.posargs else ("--page", "out/explained.md")
    session.run("python", "-m", "paged_mla_conformance.meta.explained", *page, *session.posargs)


@nox.session(default=False)
def source_mutation(session: nox.Session) -> None:
    """Change the sources one token at a time; a change without a failed test needs a reason."""
    install_editable(session, "conformance,optimized", "cosmic-ray")
    session.run("python", "-m", "ci.source_mutation", *session.posargs)


def _device_options(session: nox.Session) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(prog=f"nox -s {session.name} --")
    parser.add_argument("--device", choices=("auto", "gpu", "cpu"), default="auto")
    parser.add_argument("--backend", default=BACKEND)
    return parser.parse_known_args(session.posargs)


def _run_suite(session: nox.Session, device: str, backend: str, rest: list[str]) -> None:
    on_gpu = _on_gpu(session, device)
    install_editable(session, "conformance,optimized")
    Path("out").mkdir(exist_ok=True)
    session.run(
        *("paged-mla", "conformance", "--backend", backend),
        *("--workers", "0" if on_gpu else "auto", "--report", "out/conformance.json", *rest),
        env={} if on_gpu else INTERPRETER,
    )


def _on_gpu(session: nox.Session, device: str) -> bool:
    """Return whether a backend runs on a GPU; ``--device=gpu`` without a GPU is an error."""
    arch = _gpu_arch()
    if device == "gpu" and arch is None:
        session.error("--device=gpu needs a GPU, but nvidia-smi finds none")
    return device == "gpu" or (device == "auto" and arch is not None)


def _gpu_arch() -> str | None:
    """Return the architecture of the first GPU, for example "sm90"; ``None`` without a GPU."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.split()
    return f"sm{lines[0].replace('.', '')}" if done.returncode == 0 and lines else None
