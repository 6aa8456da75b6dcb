"""gram.cu under the thread and address sanitizers: no race, no access out of bounds.

Each barrier is left out once, and each bound: the sanitizers must say so, or they see nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from gpu.emulation import HEADER

from kernrl.gpu.gram import source

# Two bands, three tiles of columns in two parts, inputs of none, one and two tiles' depth.
MAIN = """
template <class T>
void run(Index d) {
    Index n = 70, m = 130, t = 2, span = 2;
    T parameter = 1;
    std::vector<T> x(n * d, 1), y(m * d, 2), w(m * t, 1), k(n * m), out(2 * n * t);
    T *px = x.data(), *py = y.data(), *pw = w.data(), *pk = k.data(), *po = out.data();
    const unsigned tiles[] = {6, 1}, bands[] = {2, 2};
    void* all[] = {&px, &py, &pk, &n, &m, &d, &parameter};
    emulation::launch(&gram<Rbf, T>, tiles, THREADS, 0, 6, all);
    void* fused[] = {&px, &py, &pw, &po, &n, &m, &d, &t, &span, &parameter};
    emulation::launch(&matvec<Rbf, T, 2>, bands, THREADS, 0, 4, fused);
}
int main() {
    run<float>(0);
    run<float>(3);
    run<double>(17);
}
"""
BARRIER = "__syncthreads();"
N_BARRIERS = 6
BOUNDS = {
    "rows read": ("inside ? source", "true ? source"),
    "weights read": ("column + c < m ? w", "true ? w"),
    "rows written": ("i + r < n && j", "j"),
    "sums written": ("row + thread < n && s < t", "s < t"),
}
pytestmark = pytest.mark.slow


def report(text: str, sanitizer: str, folder: Path) -> str:
    """What a sanitizer says of a run of the text; empty if nothing."""
    compiler, fixed = shutil.which("g++"), shutil.which("setarch")
    if compiler is None or fixed is None:
        pytest.skip("g++ or setarch is not on this machine")
    (folder / "text.cpp").write_text(f'#include "{HEADER}"\n{text}\n{MAIN}')
    flags = ["-std=c++20", "-pthread", "-O1", "-g", "-Wno-unknown-pragmas"]
    command = [compiler, *flags, f"-fsanitize={sanitizer}", "-o", "run", "text.cpp"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if "cannot find" in done.stderr:
        pytest.skip(f"g++ has no {sanitizer} sanitizer here")
    assert done.returncode == 0, done.stderr
    # -R: at random addresses the thread sanitizer finds its own shadow memory taken.
    ran = subprocess.run([fixed, "-R", "./run"], cwd=folder, capture_output=True, text=True)
    assert (ran.returncode == 0) == (ran.stderr == ""), ran
    return ran.stderr


def without_barrier(text: str, index: int) -> str:
    """The text with its barrier number `index` left out."""
    parts = text.split(BARRIER)
    assert len(parts) == N_BARRIERS + 1
    return BARRIER.join(parts[: index + 1]) + ";" + BARRIER.join(parts[index + 1 :])


@pytest.mark.parametrize("sanitizer", ["thread", "address,undefined"])
def test_nothing_is_reported(tmp_path, sanitizer):
    assert report(source(), sanitizer, tmp_path) == ""


@pytest.mark.parametrize("index", range(N_BARRIERS))
def test_a_missing_barrier_is_reported(tmp_path, index):
    text = without_barrier(source(), index)
    assert re.search("WARNING: ThreadSanitizer: data race", report(text, "thread", tmp_path))


@pytest.mark.parametrize("bound", BOUNDS)
def test_a_missing_bound_is_reported(tmp_path, bound):
    right, wrong = BOUNDS[bound]
    assert source().count(right) == 1
    text = source().replace(right, wrong)
    # What lies past the end may be a freed block: the sanitizer then names that.
    outside = "ERROR: AddressSanitizer: heap-(buffer-overflow|use-after-free)"
    assert re.search(outside, report(text, "address,undefined", tmp_path))
