"""What every test shares: one thread, one random stream, one profile, an honest summary."""

from __future__ import annotations

import os

# Before anything loads BLAS or torch: thread counts change results in the last digits, and many
# small products on two cores run several times faster on one thread.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
os.environ.setdefault("MPLBACKEND", "Agg")  # no test opens a window

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# Why each group is left out of a plain run, and how it is run.
GROUPS = {
    "slow": ("takes more than about ten seconds a test", "pytest -m slow"),
    "peers": ("needs another RL library installed to compare with", "pytest -m peers"),
    "gpu": ("needs a CUDA device", "make gpu"),
    "browser": ("needs a headless browser", "pytest -m browser"),
}
DESELECTED = pytest.StashKey[Counter]()

settings.register_profile(
    "kernrl",
    deadline=None,  # a shared machine's clock says nothing about the code
    max_examples=40,
    derandomize=True,  # the same examples in every run: a red run can be repeated
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("kernrl")


@pytest.fixture
def rng() -> np.random.Generator:
    """A fresh generator with a fixed seed."""
    return np.random.default_rng(20240601)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[DESELECTED] = Counter()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = [item for item in items if item.get_closest_marker("gpu")]
    if wanted and _chosen(config, "gpu") and not _cuda():
        for item in wanted:
            item.add_marker(pytest.mark.skip(reason="no CUDA device on this machine"))


def pytest_deselected(items: list[pytest.Item]) -> None:
    for item in items:
        counts = item.config.stash[DESELECTED]
        counts.update(name for name in GROUPS if item.get_closest_marker(name))


def pytest_report_header(config: pytest.Config) -> list[str]:
    left_out = [name for name in GROUPS if not _chosen(config, name)]
    return [f"left out: {name}, {GROUPS[name][0]} ({GROUPS[name][1]})" for name in left_out]


def pytest_sessionfinish(session: pytest.Session) -> None:
    output = getattr(session.config, "workeroutput", None)
    if output is not None:  # an xdist worker hands its counts to the controller
        output["deselected"] = dict(session.config.stash[DESELECTED])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    counts = getattr(node, "workeroutput", {}).get("deselected", {})
    node.config.stash[DESELECTED] = Counter(counts)  # every worker collects the same tests


def pytest_terminal_summary(terminalreporter, exitstatus: int, config: pytest.Config) -> None:
    for name, count in sorted(config.stash[DESELECTED].items()):
        why, how = GROUPS[name]
        tests = "test" if count == 1 else "tests"
        terminalreporter.write_line(f"DESELECTED {count} {name} {tests}: {why}; run `{how}`")


def _chosen(config: pytest.Config, group: str) -> bool:
    """Whether the -m expression lets tests of this group run."""
    return f"not {group}" not in config.getoption("markexpr", "")


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
