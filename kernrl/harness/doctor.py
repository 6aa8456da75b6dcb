"""What works on this machine. Each probe is a small program of its own: a library that crashes
the interpreter, as a missing OpenGL does, is one line of the answer and not its end.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from kernrl.harness import machine

SECONDS = 120


@dataclass(frozen=True)
class Probe:
    """A program that prints what it found; a needed one must succeed."""

    name: str
    program: str
    cure: str
    needed: bool = False
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finding:
    """What a probe said."""

    name: str
    works: bool
    needed: bool
    text: str
    cure: str


EXTRA = "pip install 'kernrl[{}]'"
GPU_EXTRA = f"It needs a CUDA GPU and {EXTRA.format('gpu-cuda12')} (or gpu-cuda13)."

PROBES = (
    Probe(
        "Python",
        "import sys; print(sys.version.split()[0], sys.executable); "
        "assert sys.version_info >= (3, 11), 'older than 3.11'",
        "Install Python 3.11 or newer.",
        needed=True,
    ),
    Probe(
        "NumPy",
        "import numpy as np, scipy.linalg, threadpoolctl as t; np.ones((2, 2)) @ np.ones((2, 2)); "
        "pools = {p['internal_api'] + ' ' + str(p['num_threads']) for p in t.threadpool_info()}; "
        "print(np.__version__, '· SciPy', scipy.__version__, '· threads:', *sorted(pools))",
        "pip install numpy scipy threadpoolctl",
        needed=True,
    ),
    Probe(
        "torch",
        "import torch; torch.ones(2, requires_grad=True).sum().backward(); "
        "print(torch.__version__, '· threads:', torch.get_num_threads())",
        "pip install torch",
        needed=True,
    ),
    Probe(
        "Gymnasium",
        "import gymnasium as g; e = g.make('CartPole-v1'); e.reset(seed=0); e.step(0); "
        "print(g.__version__, '·', len(g.registry), 'environments')",
        "pip install gymnasium",
        needed=True,
    ),
    Probe(
        "files",
        "import os, tempfile as t; f = t.TemporaryFile(); g = t.TemporaryFile(dir='.'); "
        "print('can write in', os.getcwd(), 'and', t.gettempdir())",
        "Work in a folder you may write to, or pass --out.",
        needed=True,
    ),
    Probe(
        "GPU",
        "import torch; assert torch.cuda.is_available(), 'torch sees no CUDA device'; "
        "print(torch.cuda.get_device_name(), '· CUDA', torch.version.cuda)",
        "Everything runs on the CPU too.",
    ),
    Probe(
        "CuPy",
        "import cupy; x = cupy.ones((2, 2)); print(cupy.__version__, float((x @ x).sum()) == 8)",
        GPU_EXTRA,
    ),
    Probe(
        "Triton",
        "import triton, torch; assert torch.cuda.is_available(), "
        "f'{triton.__version__} is there, a CUDA device is not'; print(triton.__version__)",
        GPU_EXTRA,
    ),
    Probe("Ray", "import ray; print(ray.__version__)", EXTRA.format("scale")),
    Probe("pyarrow", "import pyarrow; print(pyarrow.__version__)", EXTRA.format("data")),
    Probe("Minari", "import minari; print(minari.__version__)", EXTRA.format("data")),
    Probe(
        "Box2D",
        "import gymnasium as g; g.make('LunarLander-v3').reset(seed=0); print('LunarLander-v3')",
        "pip install 'gymnasium[box2d]'",
    ),
    Probe(
        "MuJoCo",
        "import mujoco, gymnasium as g; g.make('InvertedPendulum-v5').reset(seed=0); "
        "print(mujoco.__version__)",
        "pip install 'gymnasium[mujoco]'",
    ),
    Probe(
        "MuJoCo pictures",
        "import gymnasium as g; e = g.make('InvertedPendulum-v5', render_mode='rgb_array'); "
        "e.reset(seed=0); print('drawn without a screen, MUJOCO_GL=egl', e.render().shape)",
        "Install an EGL driver; set MUJOCO_GL=egl before Python starts.",
        environment={"MUJOCO_GL": "egl"},
    ),
)


def examine(probes: tuple[Probe, ...] = PROBES) -> list[Finding]:
    """Run every probe, a few at a time; the findings in their order."""
    with ThreadPoolExecutor(max(2, machine.cores())) as pool:
        return list(pool.map(_run, probes))


def _run(probe: Probe) -> Finding:
    try:
        done = subprocess.run(
            [sys.executable, "-c", probe.program],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            env=os.environ | probe.environment,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Finding(probe.name, False, probe.needed, f"no answer in {SECONDS} s", probe.cure)
    works = done.returncode == 0
    text = done.stdout.strip() if works else _reason(done.stderr, done.returncode)
    return Finding(probe.name, works, probe.needed, text, "" if works else probe.cure)


def _reason(stderr: str, code: int) -> str:
    """The last line of a traceback, in words."""
    last = ([line for line in stderr.splitlines() if line.strip()] or [""])[-1]
    kind, _, text = last.partition(": ")
    if kind.endswith(("ModuleNotFoundError", "NotInstalled")):
        return "not installed"
    if code < 0:
        return f"Python was ended by signal {-code}"
    return text if kind.endswith("Error") and text else last or f"exit status {code}"
