"""A run folder becomes a page: one self-contained HTML file, its pictures, its tables."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from kernrl import checks
from kernrl.data.files import replacing
from kernrl.harness import records, stats, summary
from kernrl.harness.records import Run, open_run
from kernrl.harness.summary import Result


@dataclass(frozen=True)
class Report:
    """The files of a report."""

    html: Path
    pictures: tuple[Path, ...]
    tables: tuple[Path, ...]


def report(run_dir: str | Path | Run) -> Report:
    """Write report.html, figures/*.png and *.svg, and tables/*.csv into a finished run folder.

    Everything follows from the folder's own files, so it can be written again at any time.
    The page needs no network and follows the reader's light or dark setting.
    """
    run = open_run(run_dir)
    results = summary.summarise(run)
    folder = run.folder
    if not results:
        errors = sorted({cell["error"] for cell in run.failed})
        checks.fail("report", "at least one cell must have finished", errors[0], "All failed.")
    pictures = dict(_pictures(results))
    page = _page(run, results, {name: svg for name, (svg, _) in pictures.items()})
    (folder / "figures").mkdir(exist_ok=True)
    (folder / "tables").mkdir(exist_ok=True)
    written = []
    for name, (svg, png) in pictures.items():
        records.write_text(folder / "figures" / f"{name}.svg", svg)
        with replacing(folder / "figures" / f"{name}.png") as temporary:
            temporary.write_bytes(png)
        written += [folder / "figures" / f"{name}.png", folder / "figures" / f"{name}.svg"]
    tables = tuple(_tables(folder / "tables", run, results))
    records.write_text(folder / "report.html", page)
    return Report(folder / "report.html", tuple(written), tables)


# ---------------------------------------------------------------- pictures and tables

KINDS = {
    "steps": "Learning curves against environment steps",
    "cpu": "Learning curves against training time",
    "seeds": "Final scores, run by run",
    "profile": "Performance profile",
}
RUN_COLUMNS = (
    *("id", "env", "agent", "seed", "status", "score", "steps", "updates"),
    *("cpu_s", "wall_s", "peak_memory_mib", "hash", "error"),
)


def _pictures(results: list[Result]) -> Iterator[tuple[str, tuple[str, bytes]]]:
    """(name, (svg, png)) of the overview and of every environment × kind."""
    from kernrl.harness import figures  # matplotlib takes half a second

    agents = list(dict.fromkeys(r.agent for r in results))
    looks = figures.Looks(agents)
    with figures.style():
        made = {"overview": figures.overview(results, looks)}
        for k, env in enumerate(_envs(results)):
            here = [r for r in results if r.env == env]
            made[f"{k}-steps"] = figures.single(figures.curves, here, looks, "steps")
            made[f"{k}-cpu"] = figures.single(figures.curves, here, looks, "cpu")
            made[f"{k}-seeds"] = figures.single(figures.seeds, here, looks)
            made[f"{k}-profile"] = figures.single(figures.profile, here, looks)
        for name, figure in made.items():
            yield name, (figures.svg(figure, name), figures.png(figure))


def _tables(folder: Path, run: Run, results: list[Result]) -> Iterator[Path]:
    rows = [result.row() for result in results]
    yield _table(folder / "scores.csv", rows)
    runs = [{key: cell.get(key) for key in RUN_COLUMNS} for cell in run.cells]
    yield _table(folder / "runs.csv", runs)
    yield _table(folder / "curves.csv", list(_curve_rows(results)))


def _table(path: Path, rows: list[dict[str, Any]]) -> Path:
    records.write_table(path, rows, rows[0])
    return path


def _curve_rows(results: list[Result]) -> Iterator[dict[str, Any]]:
    for result in results:
        for axis in ("steps", "cpu"):
            band = result.band(axis)
            for point in zip(band.x, band.middle, band.low, band.high, strict=True):
                x, middle, low, high = (float(value) for value in point)
                common = {"env": result.env, "agent": result.agent, "axis": axis, "x": x}
                yield common | {"iqm": middle, "low": low, "high": high, "runs": result.n}


# ---------------------------------------------------------------- the page


def _page(run: Run, results: list[Result], svgs: dict[str, str]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {"number": number, "when": _when, "seconds": _seconds}
    template = files("kernrl.harness").joinpath("report.html.j2").read_text(encoding="utf-8")
    agents, table = summary.improvements(results)
    sections = [
        {
            "env": env,
            "results": [r for r in results if r.env == env],
            "absent": _absent(run, env),
            "pictures": [
                {"src": _embed(svgs[f"{k}-{kind}"]), "alt": f"{title}, {env}", "title": title}
                for kind, title in KINDS.items()
            ],
        }
        for k, env in enumerate(_envs(results))
    ]
    return environment.from_string(template).render(
        manifest=run.manifest,
        cells=run.cells,
        failed=run.failed,
        sections=sections,
        agents=agents,
        improvements=table,
        compare=len(agents) > 1,
        fewest=stats.FEWEST_RUNS,
        methods=sorted({r.interval.method for r in results if r.interval is not None}),
        experiment=json.dumps(run.manifest["experiment"], indent=2, ensure_ascii=False),
        study=run.manifest["experiment"]["experiment"],
    )


def _absent(run: Run, env: str) -> list[str]:
    """Agents none of whose runs finished in this environment."""
    here = [cell for cell in run.cells if cell["env"] == env]
    alive = {cell["agent"] for cell in here if cell["status"] == "done"}
    return list(dict.fromkeys(cell["agent"] for cell in here if cell["agent"] not in alive))


def _embed(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _envs(results: list[Result]) -> list[str]:
    return list(dict.fromkeys(r.env for r in results))


def number(x: float | None) -> str:
    """A score for reading: four digits, a true minus sign, thousands set apart.

    >>> number(-81.456), number(20480.0), number(None), number(500.0)
    ('−81.46', '20 480', '–', '500')
    """
    if x is None or x != x:
        return "–"
    if abs(x) >= 10_000:
        text = f"{x:,.0f}".replace(",", " ")
    else:
        text = f"{x:.4g}" if abs(x) < 1000 else f"{x:.0f}"
    return text.replace("-", "−")


def _seconds(x: float | None) -> str:
    if x is None:
        return "–"
    return f"{x:.1f} s" if x < 100 else f"{x / 60:.1f} min"


def _when(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(seconds))
