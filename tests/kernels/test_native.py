"""The native CPU kernels against the float64 oracle, and how they are built and found."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ernie5.kernels.flashmask import MaskPlan, flashmask_attention, native
from ernie5.kernels.native import build
from tests.kernels.conformance import CASES, HEAD_DIMS, Case, check, matrix_cases, tensors
from tests.kernels.flashmask_cases import MASKS, mask_case

try:
    build.library()
except build.NativeUnavailableError as error:
    pytest.skip(f"no native kernels: {error}", allow_module_level=True)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_conformance(case, dtype):
    check(case, dtype, backend="native")


@pytest.mark.parametrize("head_dim", [32, 80])
def test_one_query_that_sees_few_keys(head_dim):
    """Where the output's rounding, taken for exact, was most of dK."""
    check(Case("share_question", head_dim, 1, 128, (4, 4), 2), torch.bfloat16, backend="native")


@pytest.mark.slow
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_conformance_matrix(mask, head_dim, dtype):
    for case in matrix_cases(mask, head_dim):
        check(case, dtype, backend="native")


def test_long_rows_take_larger_tiles():
    """Long rows have tiles of another size; a document at their very end shows both edges."""
    rows = 16500
    intervals = mask_case("causal_document", rows, rows, 1)
    plan = MaskPlan.from_intervals(intervals, rows)
    assert (
        native.native_mask(plan).row_block
        != native.native_mask(MaskPlan.from_intervals(intervals[:, :, :48], rows)).row_block
    )
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, rows, 1, 16, generator=generator) for _ in range(3))
    out = flashmask_attention(query, key, value, plan=plan, backend="native")
    last = rows - 300
    q, k, v = (t[0, :, 0].double() for t in (query, key, value))
    scores = (q[last:] @ k.T / 4).masked_fill(~plan.dense(last)[0, 0], -torch.inf)
    torch.testing.assert_close(out[0, last:, 0].double(), scores.softmax(-1) @ v, rtol=0, atol=1e-5)


def test_result_does_not_depend_on_the_run_and_hardly_on_threads():
    """Sums run in a fixed order however the threads are scheduled."""
    query, key, value = tensors(2, 700, 700, 4, 2, 32, torch.float32, seed=3)
    plan = MaskPlan.from_intervals(mask_case("mixed", 700, 700, 2), 700)
    cotangent = torch.randn_like(query)

    def run(threads: int) -> tuple[torch.Tensor, ...]:
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            out = flashmask_attention(query, key, value, plan=plan, backend="native")
            return (out, *torch.autograd.grad(out, (query, key, value), cotangent))
        finally:
            torch.set_num_threads(before)

    first = run(3)
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, run(3)))
    for a, b in zip(first, run(1)):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-5)


def test_views_of_one_tensor_need_no_copy_and_give_the_same():
    """Query, key and value as slices of one projection, as the backbone has them."""
    generator = torch.Generator().manual_seed(1)
    joined = torch.randn(2, 130, 8, 48, generator=generator)
    query, key, value = joined.split([4, 2, 2], 2)
    plan = MaskPlan.from_intervals(mask_case("causal_document", 130, 130, 2), 130)
    out = flashmask_attention(query, key, value, plan=plan, backend="native")
    same = flashmask_attention(*(t.contiguous() for t in (query, key, value)), plan=plan, backend="native")
    assert torch.equal(out, same)
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (query, key, value)]
    assert torch.equal(flashmask_attention(*turned, plan=plan, backend="native"), same)
    backwards = [
        torch.as_strided(t.flip(-1).contiguous(), t.shape, t.contiguous().stride()).flip(-1)
        for t in (query, key, value)
    ]
    assert torch.equal(flashmask_attention(*backwards, plan=plan, backend="native"), same)


def test_negative_and_large_scales():
    query, key, value = tensors(1, 90, 90, 2, 1, 32, torch.float32, seed=4)
    plan = MaskPlan.from_intervals(mask_case("sliding_window", 90, 90, 1), 90)
    for scale in (-0.5, 0.0, 30.0):
        results = []
        for backend in ("native", "reference"):
            out, lse = flashmask_attention(
                query, key, value, plan=plan, softmax_scale=scale, backend=backend, return_softmax_lse=True
            )
            results.append((out, lse, *torch.autograd.grad(out.sum(), (query, key, value))))
        for ours, plain in zip(*results):
            torch.testing.assert_close(ours, plain, rtol=2e-4, atol=2e-4)


VARIANT = """
import ctypes, sys, torch
from ernie5.kernels.flashmask import native
library = ctypes.CDLL(sys.argv[1])
assert library.vector_panel() == int(sys.argv[2])
native._library = lambda: library
from tests.kernels.conformance import CASES, check
for case in CASES[:: int(sys.argv[3])]:
    for dtype in (torch.float32, torch.bfloat16):
        check(case, dtype, backend="native")
"""


@pytest.mark.parametrize(
    "name,flags,panel",
    [
        ("portable", (), 8),
        # Vectors of 16 floats and products of pairs of bfloat16, made of what this machine has.
        ("wide", ("-DVECTOR_LANES=16", "-DBF16_DOT=1"), 32),
    ],
)
def test_variants_that_this_cpu_would_not_choose(
    tmp_path: Path, name: str, flags: tuple[str, ...], panel: int
):
    """Every vector width runs the same source, so other machines' variants are tested here too."""
    compiler = build.find_compiler()
    target = tmp_path / f"{name}.so"
    here = build.best_variant() if name == "wide" else "portable"
    build.compile_to(target, compiler, (*build.compile_flags(compiler, here), "-Wno-psabi", *flags))
    root = Path(__file__).parents[2]
    subprocess.run(
        [sys.executable, "-c", VARIANT, str(target), str(panel), "11"], cwd=root, check=True, timeout=300
    )


@pytest.mark.parametrize("variant", ["avx512", "avx512_bf16"])
def test_variants_for_other_cpus_compile(tmp_path: Path, variant: str):
    import platform

    if platform.machine() != "x86_64":
        pytest.skip("x86 instruction sets")
    target = tmp_path / "kernels.so"
    compiler = build.find_compiler()
    build.compile_to(target, compiler, build.compile_flags(compiler, variant))
    assert target.stat().st_size > 10_000


def test_variant_is_the_best_that_the_cpu_has():
    avx2 = frozenset({"avx2", "fma"})
    wide = avx2 | {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
    assert build.best_variant(frozenset()) == "portable"
    assert build.best_variant(avx2) == "avx2"
    assert build.best_variant(wide) == "avx512"
    assert build.best_variant(wide | {"avx512_bf16"}) == "avx512_bf16"


FRESH = """
import logging, torch
logging.basicConfig()
from ernie5.kernels.flashmask import flashmask_attention
q, k, v = torch.randn(3, 1, 40, 2, 16).unbind(0)
for _ in range(2):
    out = flashmask_attention(q, k, v, causal=True)
plain = flashmask_attention(q, k, v, causal=True, backend="reference")
assert (out - plain).abs().max() < 1e-5
print("done")
"""


def fresh(cache: Path, **extra: str) -> subprocess.Popen[str]:
    environment = {**os.environ, "ERNIE_MULTI_CACHE": str(cache), **extra}
    return subprocess.Popen(
        [sys.executable, "-c", FRESH],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_processes_that_start_together_compile_once(tmp_path: Path):
    processes = [fresh(tmp_path) for _ in range(3)]
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0 and out == "done\n", err
    libraries = list((tmp_path / "native").glob("*.so"))
    assert len(libraries) == 1
    ctypes.CDLL(str(libraries[0]))


def test_without_a_compiler_the_portable_backend_serves_and_says_so_once(tmp_path: Path):
    process = fresh(tmp_path, CXX="no-such-compiler", PATH="")
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0 and out == "done\n", err
    assert err.count("slower portable backend") == 1
    assert "install g++" in err


def test_the_compilers_variable_may_carry_arguments(tmp_path: Path, monkeypatch):
    """ "ccache g++" is two words, and a program that is not there is not replaced in silence."""
    wrapper = tmp_path / "wrapper"
    wrapper.write_text(f"#!/bin/sh\necho called >> '{tmp_path}/calls'\nexec \"$@\"\n")
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -DNDEBUG")
    compiler = build.find_compiler()
    assert compiler == (str(wrapper), "g++", "-DNDEBUG")
    target = tmp_path / "kernels.so"
    build.compile_to(target, compiler, build.compile_flags(compiler, "portable"))
    assert target.stat().st_size > 10_000 and (tmp_path / "calls").read_text().count("called") >= 2


@pytest.mark.parametrize("named", ["no-such-compiler -O3", "", "  "])
def test_a_compiler_that_is_not_there_gives_way_to_one_that_is(monkeypatch, caplog, named: str):
    monkeypatch.setenv("CXX", named)
    assert len(build.find_compiler()) == 1
    assert ("no-such-compiler, which is not installed" in caplog.text) == ("no-such" in named)


def test_a_compilers_variable_that_cannot_be_split_is_refused(monkeypatch):
    monkeypatch.setenv("CXX", "g++ 'unclosed")
    with pytest.raises(build.NativeUnavailableError, match="can't be split into words"):
        build.find_compiler()


def test_a_folder_that_others_may_write_to_is_not_used(tmp_path: Path):
    folder = tmp_path / "native"
    folder.mkdir()
    folder.chmod(0o777)
    out, err = fresh(tmp_path).communicate(timeout=120)
    assert out == "done\n" and "others may write" in err


def test_a_damaged_library_is_made_anew(tmp_path: Path):
    process = fresh(tmp_path)
    process.communicate(timeout=300)
    (library,) = (tmp_path / "native").glob("*.so")
    library.unlink()
    library.write_bytes(b"")
    out, err = fresh(tmp_path).communicate(timeout=300)
    assert out == "done\n" and "compiling it anew" in err
    assert library.stat().st_size > 10_000


@pytest.mark.parametrize(
    "extra,reason",
    [
        ({"CXX": "/bin/true"}, "made nothing"),
        ({"HOME": "", "ERNIE_MULTI_CACHE": "/proc/nowhere"}, "set ERNIE_MULTI_CACHE"),
    ],
)
def test_what_keeps_the_kernels_from_being_made_is_said_and_panels_serve(tmp_path: Path, extra, reason):
    out, err = fresh(tmp_path, **extra).communicate(timeout=120)
    assert out == "done\n" and reason in err and "slower portable backend" in err


def test_a_variant_that_this_cpu_lacks_is_refused(tmp_path: Path):
    if build.best_variant() == "avx512_bf16":
        pytest.skip("this CPU has every variant")
    process = fresh(tmp_path, ERNIE_MULTI_NATIVE="avx512_bf16")
    _, err = process.communicate(timeout=120)
    assert process.returncode and "which this CPU lacks" in err
