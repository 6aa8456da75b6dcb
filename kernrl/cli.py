"""kernrl run | eval | report | list | doctor."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    help="Kernel-based reinforcement learning, and one way to run and judge any agent.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

WRONG_INPUT, INTERRUPTED = 2, 130
USER_ERRORS = (ValueError, TypeError, OSError, ImportError, RuntimeError, MemoryError)


def main() -> None:
    """The entry point."""
    app(prog_name="kernrl")


def plainly(command: Callable[..., None]) -> Callable[..., None]:
    """An error that the user can mend is one line and exit code 2; KERNRL_DEBUG=1 shows where."""

    @wraps(command)
    def inner(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except typer.Exit:  # a RuntimeError to Python, not to us
            raise
        except KeyboardInterrupt as stop:
            _complain(str(stop) or "stopped")
            raise typer.Exit(INTERRUPTED) from None
        except USER_ERRORS as error:
            if os.environ.get("KERNRL_DEBUG"):
                raise
            _complain(str(error) or type(error).__name__)
            raise typer.Exit(WRONG_INPUT) from None

    return inner


def _complain(text: str) -> None:
    typer.echo(f"kernrl: {' '.join(text.split())}", err=True)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"kernrl {sys.modules['kernrl'].__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    pass


# ---------------------------------------------------------------- run, report, eval


@app.command()
@plainly
def run(
    file: Annotated[Path, typer.Argument(help="The experiment, a TOML file.")],
    seeds: Annotated[int | None, typer.Option(help="Use the seeds 0 … N−1.", metavar="N")] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes at once; the cores by default.", metavar="N")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where run folders go.", metavar="DIR")] = Path("runs"),
    resume: Annotated[
        bool, typer.Option("--resume", help="Do what is missing in the newest run of this file.")
    ] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="A tenth of the steps, three seeds: does it run?")
    ] = False,
    page: Annotated[bool, typer.Option("--report/--no-report", help="Write the report.")] = True,
) -> None:
    """Run an experiment and write its report."""
    from kernrl.harness.launch import run_experiment

    done = run_experiment(file, seeds=seeds, jobs=jobs, out=out, resume=resume, quick=quick)
    failed = len(done.failed)
    if page and done.done:
        _show(done)
        _write(done)
    typer.echo(f"run     {done.folder}")
    if failed:
        _complain(f"{failed} of {len(done.cells)} cells failed: {done.failed[0]['error']}")
        raise typer.Exit(1)


@app.command()
@plainly
def report(
    run_dir: Annotated[Path, typer.Argument(help="The folder that kernrl run printed.")],
) -> None:
    """Write the report of a run again."""
    from kernrl.harness.records import open_run

    done = open_run(run_dir)
    _write(done)


@app.command("eval")
@plainly
def evaluate_checkpoint(
    checkpoint: Annotated[Path, typer.Argument(help="A saved agent, or the folder it lies in.")],
    env: Annotated[str, typer.Argument(help="A Gymnasium id, such as CartPole-v1.")],
    episodes: Annotated[int, typer.Option(help="Whole episodes to play.", metavar="N")] = 20,
    seed: Annotated[int, typer.Option(help="Which episodes.", metavar="N")] = 0,
    sampled: Annotated[
        bool, typer.Option("--sampled", help="Sample actions instead of taking the best.")
    ] = False,
) -> None:
    """Play whole episodes with a saved agent."""
    from kernrl.agent import Agent
    from kernrl.harness.evaluation import evaluate

    path = checkpoint / "agent.safetensors" if checkpoint.is_dir() else checkpoint
    agent = Agent.load(path)
    typer.echo(str(evaluate(agent, env, episodes, seed, deterministic=not sampled)))


def _write(done: Any) -> None:
    from kernrl.harness.reporting import report as write

    typer.echo(f"report  {write(done).html}")


def _show(done: Any) -> None:
    """The scores on the terminal."""
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    from kernrl.harness.reporting import number
    from kernrl.harness.summary import summarise

    table = Table(box=SIMPLE, pad_edge=False)
    table.add_column("environment")
    for name in ("agent", "runs"):
        table.add_column(name, no_wrap=True)
    for name in ("median", "IQM", "95 % interval", "worst", "steps", "CPU s"):
        table.add_column(name, justify="right", no_wrap=True)
    for r in summarise(done):
        i = r.interval
        interval = f"[{number(i.low)}, {number(i.high)}]" if i else "–"
        row = (r.median, r.iqm, interval, r.worst, r.steps, r.cpu_s)
        cells = [one if isinstance(one, str) else number(one) for one in row]
        table.add_row(*(_literal(one) for one in (r.env, r.agent, str(r.n), *cells)))
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(table)


def _literal(text: str) -> Any:
    """Text in which square brackets are square brackets."""
    from rich.text import Text

    return Text(text)


# ---------------------------------------------------------------- list, doctor


class Kind(StrEnum):
    """What can be listed."""

    agents = "agents"
    kernels = "kernels"
    experiments = "experiments"


@app.command("list")
@plainly
def list_things(
    kind: Annotated[Kind, typer.Argument(help="agents, kernels or experiments")],
    folder: Annotated[
        Path, typer.Option("--in", help="Where experiments are looked for.", metavar="DIR")
    ] = Path("experiments"),
) -> None:
    """List agents, kernels or experiments."""
    rooms = {Kind.agents: ("control", "deep"), Kind.kernels: ("kernels",)}
    found = _experiments(folder) if kind is Kind.experiments else _classes(rooms[kind])
    rows = list(found)
    width = max((len(name) for name, _ in rows), default=0)
    for name, text in rows:
        typer.echo(f"{name:<{width}}  {text}")
    if not rows:
        _complain(f"no {kind.value} found" + (f" in {folder}" if kind is Kind.experiments else ""))


def _classes(rooms: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """(import path, first line of the docstring) of the public classes of some rooms.

    Read from the source, so that listing the deep agents does not load torch.
    """
    import ast
    import importlib

    for room in rooms:
        public = set(importlib.import_module(f"kernrl.{room}").__all__)
        for path in sorted(Path(__file__).with_name(room).glob("*.py")):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if not isinstance(node, ast.ClassDef) or node.name not in public:
                    continue
                bases = {getattr(base, "id", "") for base in node.bases}
                if ("Agent" in bases) if room != "kernels" else bases:
                    text = (ast.get_docstring(node) or "").partition("\n")[0]
                    yield f"kernrl.{room}.{path.stem}.{node.name}", text


def _experiments(folder: Path) -> Iterator[tuple[str, str]]:
    """(file, description) of the experiments below a folder."""
    import tomllib

    for path in sorted(folder.rglob("*.toml")):
        try:
            study = tomllib.loads(path.read_text(encoding="utf-8")).get("experiment", {})
        except ValueError as error:
            study = {"description": f"not readable: {error}"}
        yield str(path), study.get("description", "")


@app.command()
@plainly
def doctor() -> None:
    """Say what works on this machine."""
    from kernrl.harness.doctor import examine

    findings = examine()
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        mark = "✓" if finding.works else "✗" if finding.needed else "–"
        cure = f" → {finding.cure}" if finding.cure else ""
        typer.echo(f"{mark} {finding.name:<{width}}  {finding.text}{cure}")
    broken = [finding.name for finding in findings if finding.needed and not finding.works]
    if broken:
        _complain(f"kernrl cannot work without {', '.join(broken)}")
        raise typer.Exit(1)
