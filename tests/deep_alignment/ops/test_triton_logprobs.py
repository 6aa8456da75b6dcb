"""The row op's Triton kernels without a GPU: run by the interpreter, compiled for two GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from tolerances import tolerance

triton = pytest.importorskip("triton", reason="triton is not installed (it is in the GPU extras)")

HERE = Path(__file__).parent
REGISTERS = 64  # 8 warps of 64 registers a thread: four programs share a multiprocessor
NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


def interpreted(*options: str) -> str:
    """interpreted_logprobs.py, in a process that asks for the interpreter first: pytest's words."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options]
    done = subprocess.run(
        [*command, str(HERE / "interpreted_logprobs.py")],
        cwd=HERE.parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return done.stdout


def test_in_the_interpreter():
    passed = re.search(r"(\d+) passed", interpreted())
    assert passed and int(passed[1]) >= 60


@pytest.mark.peers
def test_beside_liger_in_the_interpreter():
    print("liger-kernel", version("liger-kernel") if find_spec("liger_kernel") else "is missing")
    said = interpreted("-m", "peers")
    assert re.search(r"\d+ passed", said) or not find_spec("liger_kernel"), said


SIZES = {
    "n_vocab": "i32",
    "n_inner": "i32",
    "outer_stride": "i64",
    "inner_stride": "i64",
    "per_temperature": "fp32",
}
ALIGNED = ("logits", "out", "n_vocab", "inner_stride", "outer_stride")
KERNELS = {
    "_stats_kernel": (
        {**dict.fromkeys(("logprob", "entropy", "lse"), "*fp32"), **SIZES},
        {"MASKED": True},
    ),
    "_sums_kernel": (
        {"out": "*fp32", "n_rows": "i32", "n_vocab": "i32", "per_temperature": "fp32"},
        {},
    ),
    "_gradient_kernel": (
        {**dict.fromkeys(("reference", "a", "b", "c"), "*fp32"), "n_tiles": "i32", **SIZES},
        {"MASKED": True, "SLOPED": True},
    ),
}


def compiled(name: str, dtype: torch.dtype, capability: int, tmp_path: Path):
    """The kernel for a GPU of that capability, and what its assembler says of it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from kernrl.deep_alignment.ops._triton import logprobs as kernels

    function = getattr(kernels, name)
    own, constants = KERNELS[name]
    pointers = {"logits": f"*{NAMES[dtype]}", "ids": "*i64", "mask": "*u8"}
    given = {**pointers, "out": pointers["logits"], **own}
    constants = {**constants, "BLOCK": kernels.BLOCK}
    signature = {x: "constexpr" if x in constants else given[x] for x in function.arg_names}
    aligned = [k for k, x in enumerate(function.arg_names) if x in ALIGNED]
    options = kernels._launch(1 << 17)
    options.pop("BLOCK")
    kernel = triton.compile(
        ASTSource(
            fn=function,
            signature=signature,
            constexprs=constants,
            attrs={(k,): [["tt.divisibility", 16]] for k in aligned},
        ),
        target=GPUTarget("cuda", capability, 32),
        options=options,
    )
    file = tmp_path / "kernel.ptx"
    file.write_text(kernel.asm["ptx"])
    tools = Path(triton.__file__).parent / "backends/nvidia/bin"
    arch = f"sm_{capability}{'a' if capability == 90 else ''}"
    said = subprocess.run(
        [str(tools / "ptxas"), "-v", f"--gpu-name={arch}", str(file), "-o", str(tmp_path / "o")],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 0, said.stderr
    return kernel, said.stderr


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter is on")
@pytest.mark.skipif(sys.platform != "linux", reason="Triton's wheels bring ptxas on Linux only")
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_ahead_of_time_it_fits_and_spills_nothing(name, dtype, capability, tmp_path):
    kernel, said = compiled(name, dtype, capability, tmp_path)
    used, spilt = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes spill st", said)
    assert used and int(used[1]) <= REGISTERS, said
    assert spilt and int(spilt[1]) == 0, said
    assert kernel.asm["cubin"]
    assert re.search(r"ld\.global[.\w]*\.v4\.b32", kernel.asm["ptx"])  # 16 bytes at a time
    # N·V passes 2³¹: every product, quotient and remainder of places is taken in 64 bits.
    arithmetic = re.findall(r"arith\.(?:muli|divsi|remsi) .*: (\S+)", kernel.asm["ttir"])
    assert set(arithmetic) == {"i64"}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_on_a_gpu_it_is_the_cpus_definition(dtype, rng):
    from kernrl.deep_alignment.ops.logprobs import token_logprobs

    logits = torch.tensor(rng.normal(scale=3.0, size=(4, 9, 5003))).to(dtype)
    ids = torch.as_tensor(rng.integers(5003, size=(4, 9)))
    mask = torch.as_tensor(rng.random((4, 9)) < 0.7)
    found = []
    for device in ("cuda", "cpu"):
        z = logits.to(device).requires_grad_()
        stats = token_logprobs(z, ids.to(device), temperature=0.7, mask=mask.to(device))
        (stats.logprob - 0.1 * stats.entropy + 0.01 * stats.lse**2).sum().backward()
        found.append([*(x.detach().cpu() for x in stats), z.grad.cpu()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra", got.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", NAMES, ids=NAMES.values())
def test_on_a_gpu_the_head_is_the_cpus_definition(dtype, rng):
    from kernrl.deep_alignment.ops.linear_logprobs import linear_token_logprobs

    hidden, weight = (torch.tensor(rng.normal(size=s)).to(dtype) for s in ((70, 64), (999, 64)))
    ids = torch.as_tensor(rng.integers(999, size=70))
    found = []
    for device in ("cuda", "cpu"):
        h, w = (x.to(device).requires_grad_() for x in (hidden, weight))
        stats = linear_token_logprobs(h, w, ids.to(device), chunk_size=32)
        (stats.logprob - 0.1 * stats.entropy).sum().backward()
        found.append([*(x.detach().cpu() for x in stats), h.grad.cpu(), w.grad.cpu()])
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, **tolerance("algebra", dtype))
