from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest
import tomli_w
from harness.toy_runs import toy
from typer.testing import CliRunner

import kernrl
from kernrl import cli
from kernrl.agent import Agent
from kernrl.harness import build
from kernrl.harness.doctor import Finding

runner = CliRunner()


def call(*words):
    return runner.invoke(cli.app, [str(word) for word in words])


@pytest.fixture
def file(tmp_path):
    """An experiment of one run."""
    path = tmp_path / "small.toml"
    agent = {"agent": "harness.toy_agents.Constant", "params": {"action": 2}}
    path.write_text(tomli_w.dumps(toy(agent, seeds=1, steps=100)))
    return path


# ---------------------------------------------------------------- light, and itself


def test_importing_the_command_line_is_light():
    code = (
        "import sys, kernrl.cli; heavy = {'numpy', 'torch', 'matplotlib', 'gymnasium', 'sklearn'}; "
        "print(*sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""


def test_version_and_help():
    assert call("--version").stdout == f"kernrl {kernrl.__version__}\n"
    text = call("-h").stdout
    for command in ("run", "eval", "report", "list", "doctor"):
        assert command in text
        assert call(command, "--help").exit_code == 0


def test_python_dash_m_is_the_same_program():
    command = [sys.executable, "-m", "kernrl", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"kernrl {kernrl.__version__}\n"


def test_an_unknown_command_is_a_usage_error():
    got = call("rnu")
    assert got.exit_code == 2
    assert "rnu" in got.stderr


# ---------------------------------------------------------------- run, report


def test_run_trains_and_reports(file, tmp_path):
    got = call("run", file, "--out", tmp_path / "runs", "--jobs", 1, "--seeds", 2)
    assert got.exit_code == 0, got.stderr
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"run     {folder}" in got.stdout
    assert f"report  {folder / 'report.html'}" in got.stdout
    assert "Constant" in got.stdout
    assert (folder / "report.html").is_file()
    again = call("run", file, "--out", tmp_path / "runs", "--jobs", 1, "--seeds", 2, "--resume")
    assert again.exit_code == 0
    assert "2 of 2 cells are there already." in again.stderr
    assert call("report", folder).stdout == f"report  {folder / 'report.html'}\n"


def test_a_failed_cell_is_exit_code_one(tmp_path):
    path = tmp_path / "bad.toml"
    agent = {"agent": "harness.toy_agents.Constant", "params": {"crash_at": 5}}
    path.write_text(tomli_w.dumps(toy(agent, seeds=1)))
    got = call("run", path, "--out", tmp_path / "runs", "--quick", "--no-report")
    assert got.exit_code == 1
    assert "kernrl: 1 of 1 cells failed: ArithmeticError: the sum is off and this" in got.stderr
    assert "run     " in got.stdout


USER_ERRORS = {
    "no file": (
        ("run", "nowhere.toml"),
        "kernrl: experiment: the configuration must be a TOML file, got no file 'nowhere.toml'.",
    ),
    "no run": (
        ("report", "nowhere"),
        "kernrl: run: a run folder must hold manifest.json, got none in 'nowhere'. "
        "kernrl run prints the folder that it made.",
    ),
    "no checkpoint": (
        ("eval", "nowhere.safetensors", "CartPole-v1"),
        "kernrl: Agent.load: path must be a file, got 'nowhere.safetensors'.",
    ),
}


@pytest.mark.parametrize("what", USER_ERRORS)
def test_a_users_error_is_one_line_and_exit_code_two(what):
    words, text = USER_ERRORS[what]
    got = call(*words)
    assert got.exit_code == 2
    assert got.stderr == text + "\n"
    assert got.stdout == ""


def test_a_typo_in_a_file_is_one_line(file):
    file.write_text(file.read_text().replace("steps", "stpes"))
    got = call("run", file)
    assert (got.exit_code, got.stderr) == (
        2,
        "kernrl: small.toml: unknown key 'stpes' in experiment. Did you mean 'steps'?\n",
    )


def test_debug_shows_where(monkeypatch):
    monkeypatch.setenv("KERNRL_DEBUG", "1")
    with pytest.raises(FileNotFoundError):
        runner.invoke(cli.app, ["report", "nowhere"], catch_exceptions=False)


# ---------------------------------------------------------------- eval


def test_eval_plays_a_saved_agent(tmp_path):
    from kernrl.deep.ppo import PPO

    PPO(n_steps=32, hidden=(8,), rng=0).fit("CartPole-v1", 32).save(tmp_path / "a.safetensors")
    words = ("eval", tmp_path / "a.safetensors", "CartPole-v1", "--episodes", 3)
    got = call(*words)
    assert got.exit_code == 0, got.stderr
    assert got.stdout.startswith("CartPole-v1: mean return ")
    assert got.stdout.endswith("(standard deviation of 3 episodes, deterministic actions)\n")
    assert call(*words).stdout == got.stdout
    assert "sampled actions" in call(*words, "--sampled").stdout
    wrong = call("eval", tmp_path / "a.safetensors", "Acrobot-v1")
    assert wrong.exit_code == 2
    assert wrong.stderr.startswith("kernrl: PPO: observations must have shape (4) or (b, 4), got")


# ---------------------------------------------------------------- list, doctor


def listed(*words):
    got = call("list", *words)
    assert got.exit_code == 0, got.stderr
    return dict(line.split("  ", 1) for line in got.stdout.splitlines())


def public(room):
    """The public classes of a room, through its face."""
    face = importlib.import_module(f"kernrl.{room}")
    found = (getattr(face, name) for name in face.__all__)
    return {thing for thing in found if isinstance(thing, type)}


def test_list_agents_is_every_public_agent_with_a_word_about_it():
    found = listed("agents")
    expected = {c for room in ("control", "deep") for c in public(room) if issubclass(c, Agent)}
    assert {build.locate(path) for path in found} == expected
    assert all(text.strip() for text in found.values())


def test_list_kernels_is_every_public_kernel():
    from kernrl.kernels.base import Kernel

    found = {build.locate(path) for path in listed("kernels")}
    assert found == {c for c in public("kernels") if issubclass(c, Kernel) and c is not Kernel}


def test_list_experiments(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.toml").write_text('[experiment]\nname = "x"\ndescription = "Small."\n')
    (tmp_path / "y.toml").write_text("[")
    found = listed("experiments", "--in", tmp_path)
    assert found[str(tmp_path / "a" / "x.toml")].strip() == "Small."
    assert "not readable" in found[str(tmp_path / "y.toml")]
    assert "kernrl: no experiments found in" in call("list", "experiments", "--in", "no").stderr


def test_list_knows_three_things():
    got = call("list", "agnets")
    assert got.exit_code == 2
    assert "agents" in got.stderr


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_doctor_fails_only_where_something_needed_does(works, code, monkeypatch):
    findings = [
        Finding("torch", works, True, "2.13" if works else "not installed", "" if works else "Do."),
        Finding("CuPy", False, False, "not installed", "pip install it"),
    ]
    monkeypatch.setattr("kernrl.harness.doctor.examine", lambda: findings)
    got = call("doctor")
    assert got.exit_code == code
    assert "– CuPy   not installed → pip install it" in got.stdout
    assert ("kernrl cannot work without torch" in got.stderr) is not works
    assert got.stdout.startswith("✓" if works else "✗")


def test_the_experiments_of_the_repository_are_sound():
    """Every file under experiments/ is read, and its agents and kernels can be built."""
    from kernrl.harness.experiment import load
    from kernrl.harness.worker import complaints

    files = sorted(Path(__file__).parents[1].glob("experiments/**/*.toml"))
    assert files
    for path in files:
        assert complaints(load(path).cells()) == [], path
