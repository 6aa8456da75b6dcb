from __future__ import annotations

from kernrl.harness import doctor
from kernrl.harness.doctor import Probe, examine


def only(program, **more):
    (finding,) = examine((Probe("thing", program, "Mend it.", **more),))
    return finding


def test_what_works_says_what_it_found():
    finding = only("print('version 3')")
    assert (finding.works, finding.text, finding.cure) == (True, "version 3", "")


def test_what_is_missing_is_not_installed():
    finding = only("import not_there_at_all", needed=True)
    assert (finding.works, finding.needed) == (False, True)
    assert (finding.text, finding.cure) == ("not installed", "Mend it.")


def test_a_failure_is_its_last_line():
    assert only("assert 1 > 2, 'one is not more'").text == "one is not more"
    assert only("raise SystemExit(3)").text == "exit status 3"


def test_a_crash_of_the_interpreter_is_one_line():
    assert only("import os; os.abort()").text == "Python was ended by signal 6"


def test_a_probe_that_hangs_is_given_up(monkeypatch):
    monkeypatch.setattr(doctor, "SECONDS", 1)
    assert only("import time; time.sleep(60)").text == "no answer in 1 s"


def test_a_probe_has_its_own_environment():
    program = "import os; print(os.environ['MUJOCO_GL'])"
    assert only(program, environment={"MUJOCO_GL": "egl"}).text == "egl"


def test_what_kernrl_needs_works_here():
    needed = tuple(probe for probe in doctor.PROBES if probe.needed)
    assert len(needed) >= 5
    for finding in examine(needed):
        assert finding.works, finding


def test_every_probe_is_a_program():
    for probe in doctor.PROBES:
        compile(probe.program, probe.name, "exec")
        assert probe.cure
