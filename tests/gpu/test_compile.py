"""gram.cu compiled by NVRTC for the cards it is for: nothing spilled, blocks enough resident."""

from __future__ import annotations

import pytest
from gpu import nvrtc

from kernrl.gpu import gram as host

# Registers a thread may use: a multiprocessor's 65536 over the threads wanted on it.
BUDGET = {"gram float": 64, "gram double": 80, "matvec float": 128, "matvec double": 255}
SHARED = 24 << 10  # bytes of a block: half of what needs no request to the driver


def check(names, architecture):
    for name, used in nvrtc.usage(host.source(), names, architecture).items():
        kind = f"{name.partition('<')[0]} {'double' if 'double' in name else 'float'}"
        assert used.spilled == 0, (architecture, name, used)
        assert used.registers <= BUDGET[kind], (architecture, name, used)
        assert used.shared <= SHARED, (architecture, name, used)


def test_the_first_kernels_compile_for_sm_90():
    check(["gram<Rbf, float>", "matvec<Rbf, float, 1>"], "sm_90")


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
@pytest.mark.parametrize("family", host.FAMILIES)
def test_every_kernel_compiles_without_spills(family, architecture):
    check([name for dtype in host.TYPES for name in host.expressions(family, dtype)], architecture)


def test_a_spill_would_be_seen():
    """300 numbers alive at once do not fit in the 64 registers of 1024 threads."""
    text = """
    extern "C" __global__ void __launch_bounds__(1024) greedy(const float* x, float* out) {
        float held[300];
    #pragma unroll
        for (int k = 0; k < 300; ++k) held[k] = x[k * 256 + threadIdx.x];
        __syncthreads();
    #pragma unroll
        for (int k = 0; k < 300; ++k) out[k * 256 + threadIdx.x] = held[k] * held[299 - k];
    }
    """
    assert nvrtc.usage(text, ["greedy"], "sm_90")["greedy"].spilled > 0
