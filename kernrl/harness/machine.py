"""What a run writes down about the machine: versions, commit, processor, threads, memory."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

# One thread in every worker: seeds run side by side, and thread counts change results.
THREADS = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)
PACKAGES = ("numpy", "scipy", "torch", "gymnasium", "gpytorch", "scikit-learn", "cupy")


def cores() -> int:
    """Processor cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide numbers; nothing is imported."""
    found = {"python": platform.python_version(), "kernrl": sys.modules["kernrl"].__version__}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def processor() -> str:
    """The processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def describe() -> dict[str, Any]:
    """System, processor and cores."""
    return {"system": platform.platform(), "processor": processor(), "cores": cores()}


def commit() -> str | None:
    """The git commit of the working directory, "+ changes" if it has any; None outside git."""
    try:
        found = _git("rev-parse", "HEAD")
        return found + (" + changes" if _git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def _git(*words: str) -> str:
    done = subprocess.run(["git", *words], capture_output=True, text=True, timeout=10, check=True)
    return done.stdout.strip()


# ---------------------------------------------------------------- inside a worker


def one_thread() -> dict[str, str]:
    """The environment variables that hold numerical libraries at one thread."""
    return dict.fromkeys(THREADS, "1")


def hold_torch() -> None:
    """Hold torch at one thread too, if it has been imported."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(1)


def threads() -> dict[str, Any]:
    """The thread counts that hold now: of BLAS and OpenMP as loaded, and of torch."""
    from threadpoolctl import threadpool_info

    found: dict[str, Any] = {}
    for pool in threadpool_info():
        found[pool["internal_api"]] = max(pool["num_threads"], found.get(pool["internal_api"], 0))
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = torch.get_num_threads()
    return found


def seed_globals(seed: int) -> None:
    """Seed the global generators. kernrl uses none, but a user's agent may."""
    import random

    import numpy as np

    random.seed(seed)
    np.random.seed(seed)
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(seed)


def forget_peak_memory() -> None:
    """Start the peak anew, where the system can (Linux): a worker runs many cells."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> float:
    """Peak resident memory of this process in MiB."""
    try:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    except OSError:
        pass
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 1024
