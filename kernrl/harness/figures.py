"""The pictures of a report, drawn so that they read in print, on a dark screen and without colour.

An SVG follows the reader's light or dark setting by itself: its colours become CSS variables.
A PNG is the light version on white.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from kernrl.harness import stats
from kernrl.harness.summary import Result

Axes = Any
INK, MUTED, GRID = "#24292f", "#656d76", "#d8dee3"
# Okabe & Ito's colours, which the common forms of colour blindness tell apart; the darkest first.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00")
LIGHTER = ("#4aa8e0", "#f4874a", "#35c79b", "#e5a3c8", "#8fcff5", "#ffc34d")
DARK = {
    INK: "#e6edf3",
    MUTED: "#9aa4ae",
    GRID: "#373e47",
    **dict(zip(COLOURS, LIGHTER, strict=True)),
}
DASHES = ("-", (0, (5, 1.6)), (0, (1.4, 1.4)), (0, (6, 1.5, 1.4, 1.5)))
MARKERS = "osD^vP"

STYLE: dict[str, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "legend.frameon": False,
    "svg.fonttype": "path",
    "figure.dpi": 100,
}


def style() -> AbstractContextManager[None]:
    """Matplotlib's settings for the time of drawing; the user's own come back afterwards."""
    settings: dict[Any, Any] = {**matplotlib.rcParamsDefault, **STYLE, "backend": "Agg"}
    return matplotlib.rc_context(settings)


class Looks:
    """How each agent is drawn, the same in every picture of a report."""

    def __init__(self, agents: list[str]) -> None:
        self.order = {agent: k for k, agent in enumerate(agents)}

    def colour(self, agent: str) -> str:
        """The agent's colour."""
        return COLOURS[self.order[agent] % len(COLOURS)]

    def line(self, agent: str) -> dict[str, Any]:
        """Colour, dashes and marker."""
        k = self.order[agent]
        return {
            "color": self.colour(agent),
            "linestyle": DASHES[k % len(DASHES)],
            "marker": MARKERS[k % len(MARKERS)],
        }


# ---------------------------------------------------------------- what goes on one pair of axes


def curves(axes: Axes, results: list[Result], looks: Looks, axis: str) -> None:
    """Learning curves of one environment against "steps" or "cpu": IQM, interval, single runs."""
    for result in results:
        band, line = result.band(axis), looks.line(result.agent)
        for trace in result.traces:
            x = getattr(trace, axis)
            axes.plot(x, trace.score, color=line["color"], alpha=0.28, linewidth=0.8)
        axes.fill_between(band.x, band.low, band.high, color=line["color"], alpha=0.16, linewidth=0)
        every = max(1, len(band.x) // 10)
        axes.plot(
            band.x,
            band.middle,
            linewidth=2,
            markersize=4.5,
            markevery=every,
            **line,
            label=result.agent,
        )
    _solved(axes, results, vertical=False)
    _around(axes.set_ylim, [t.score for r in results for t in r.traces], results)
    axes.set_ylabel("mean return")
    if axis == "steps":
        axes.set_xlabel("environment steps")
        axes.xaxis.set_major_formatter(FuncFormatter(_thousands))
    else:
        axes.set_xlabel("training CPU seconds, one thread")
        _seconds(axes, results)
    axes.xaxis.set_major_locator(MaxNLocator(6)) if axes.get_xscale() == "linear" else None


def seeds(axes: Axes, results: list[Result], looks: Looks) -> None:
    """Final scores of one environment: a dot for each run, the IQM and its interval."""
    for row, result in enumerate(results):
        colour = looks.colour(result.agent)
        spread = np.linspace(-0.16, 0.16, result.n) if result.n > 1 else np.zeros(1)
        interval = result.interval
        if interval is not None:
            ends = [interval.low, interval.high]
            axes.plot(ends, [row, row], color=colour, linewidth=6, alpha=0.3, solid_capstyle="butt")
        marker = MARKERS[looks.order[result.agent] % len(MARKERS)]
        axes.plot([result.iqm] * 2, [row - 0.3, row + 0.3], color=INK, linewidth=1.6)
        axes.plot(result.scores, row + spread, marker, color=colour, markersize=5.5, zorder=3)
    _solved(axes, results, vertical=True)
    _around(axes.set_xlim, [r.scores for r in results], results)
    axes.set_yticks(range(len(results)), [f"{r.agent} (n = {r.n})" for r in results])
    axes.set_ylim(len(results) - 0.5, -0.5)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("mean return of the report episodes, one dot a run")


def profile(axes: Axes, results: list[Result], looks: Looks) -> None:
    """Performance profiles of one environment: the fraction of runs that score above τ."""
    pooled = np.unique(np.concatenate([r.scores for r in results]))
    margin = 0.05 * np.ptp(pooled) or max(1.0, 0.05 * abs(pooled[0]))
    levels = np.concatenate([[pooled[0] - margin], pooled, [pooled[-1] + margin]])
    for result in results:
        line = looks.line(result.agent) | {"marker": ""}
        above = stats.performance_profile(result.scores, levels)
        axes.step(levels, above, where="post", linewidth=2, label=result.agent, **line)
    _solved(axes, results, vertical=True)
    axes.set_ylim(-0.03, 1.05)
    axes.set_xlabel("τ (mean return of the report episodes)")
    axes.set_ylabel("fraction of runs above τ")


# ---------------------------------------------------------------- whole figures


def single(draw: Callable[..., None], results: list[Result], looks: Looks, *more: Any) -> Figure:
    """One environment, one question."""
    figure = Figure(figsize=(6.4, 3.9), layout="constrained")
    axes = figure.add_subplot()
    draw(axes, results, looks, *more)
    if draw is not seeds:
        _legend(figure, axes)
    return _laid_out(figure)


def overview(results: list[Result], looks: Looks) -> Figure:
    """Everything at a glance: a row for each environment."""
    envs = list(dict.fromkeys(r.env for r in results))
    figure = Figure(figsize=(15, 0.6 + 3.5 * len(envs)), layout="constrained")
    grid = figure.subplots(len(envs), 3, squeeze=False)
    for (left, middle, right), env in zip(grid, envs, strict=True):
        here = [r for r in results if r.env == env]
        curves(left, here, looks, "steps")
        curves(middle, here, looks, "cpu")
        seeds(right, here, looks)
        left.set_title(env)
    _legend(figure, *grid[:, 0])
    return _laid_out(figure)


def _laid_out(figure: Figure) -> Figure:
    """The layout found once, not again for every format: it costs as much as drawing."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def png(figure: Figure) -> bytes:
    """The light version on white, twice the size for sharp screens."""
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=200, facecolor="white", metadata={"Software": None})
    return out.getvalue()


def svg(figure: Figure, name: str) -> str:
    """An SVG that follows light and dark; `name` makes its inner ids its own."""
    out = io.StringIO()
    with matplotlib.rc_context({"svg.hashsalt": name}):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    text = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), count=1, flags=re.DOTALL)
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    light = "".join(f"--c{colour[1:]}:{colour};" for colour in DARK)
    dark = "".join(f"--c{colour[1:]}:{other};" for colour, other in DARK.items())
    for colour in DARK:
        text = text.replace(colour, f"var(--c{colour[1:]})")
    rules = f":root{{{light}}}@media (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    return re.sub(r"(<svg[^>]*>)", rf"\1<style>{rules}</style>", text, count=1)


# ---------------------------------------------------------------- small things


def _legend(figure: Figure, *many: Axes) -> None:
    entries: dict[str, Any] = {}
    for axes in many:
        handles, labels = axes.get_legend_handles_labels()
        entries |= {
            label: h for label, h in zip(labels, handles, strict=True) if label not in entries
        }
    columns = min(4, len(entries))
    figure.legend(
        entries.values(), entries.keys(), loc="outside upper left", ncols=columns, handlelength=3
    )


def _solved(axes: Axes, results: list[Result], vertical: bool) -> None:
    """A dotted line where the environment counts as solved, if the scores come near it."""
    threshold = results[0].threshold
    if threshold is None:
        return
    draw = axes.axvline if vertical else axes.axhline
    draw(threshold, color=MUTED, linestyle=(0, (1, 2)), linewidth=1.2, zorder=1)
    if vertical:
        where, kwargs = (threshold, 1.0), {"xycoords": ("data", "axes fraction"), "ha": "center"}
        offset = (0, 3)
    else:
        where, kwargs = (0.0, threshold), {"xycoords": ("axes fraction", "data"), "ha": "left"}
        offset = (3, 3)
    axes.annotate(
        f"solved: {threshold:g}".replace("-", "−"),
        where,
        offset,
        textcoords="offset points",
        color=MUTED,
        fontsize=8,
        annotation_clip=True,
        **kwargs,
    )


def _around(set_limits: Callable[..., Any], values: list[Any], results: list[Result]) -> None:
    """Limits from what was measured, and the threshold: t intervals may reach much farther."""
    pooled = np.concatenate([np.ravel(v) for v in values])
    low, high = pooled.min(), pooled.max()
    if results[0].threshold is not None:
        low, high = min(low, results[0].threshold), max(high, results[0].threshold)
    margin = 0.06 * (high - low) or max(1.0, 0.05 * abs(high))
    set_limits(low - margin, high + margin)


def _seconds(axes: Axes, results: list[Result]) -> None:
    """A logarithmic axis where one agent takes many times as long as another."""
    ends = [t.cpu[-1] for r in results for t in r.traces]
    if min(ends) > 0 and max(ends) > 8 * min(ends):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))


def _thousands(x: float, _: Any) -> str:
    return f"{x / 1000:g}k" if abs(x) >= 1000 else f"{x:g}"
