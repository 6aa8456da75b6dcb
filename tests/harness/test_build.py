from __future__ import annotations

import pytest

from kernrl.harness import build
from kernrl.kernels.stationary import RBF

RBF_PATH = "kernrl.kernels.stationary.RBF"


def test_tables_with_a_class_become_objects_at_any_depth():
    spec = {
        "kernel": {"class": RBF_PATH, "length_scale": 0.5},
        "many": [{"class": RBF_PATH}, 3, {"plain": {"class": RBF_PATH}}],
        "gamma": 0.9,
    }
    got = build.construct(spec)
    assert got["kernel"].length_scale == 0.5
    assert isinstance(got["many"][0], RBF)
    assert isinstance(got["many"][2]["plain"], RBF)
    assert got["gamma"] == 0.9


def test_a_name_from_the_face_works_too():
    assert build.locate("kernrl.RBF") is RBF


FAULTS = {
    "a module that is not there": (
        "kernrl.kernels.stationry.RBF",
        ImportError,
        "build: 'kernrl.kernels.stationry.RBF' must be importable, "
        "got no module 'kernrl.kernels.stationry'. Did you mean 'stationary'?",
    ),
    "a class that is not there": (
        "kernrl.kernels.stationary.RFB",
        ImportError,
        "build: 'kernrl.kernels.stationary.RFB' must be importable, "
        "got no 'RFB' in kernrl.kernels.stationary. Did you mean 'RBF'?",
    ),
    "a package that is not there": (
        "kernel_rl.X",
        ImportError,
        "build: 'kernel_rl.X' must be importable, got no module 'kernel_rl'. "
        "Did you mean 'kernrl'?",
    ),
    "no path": (
        "RBF",
        ValueError,
        "build: a class must be an import path such as 'kernrl.kernels.stationary.RBF', got 'RBF'.",
    ),
}


@pytest.mark.parametrize("what", FAULTS)
def test_what_cannot_be_found_is_named(what):
    path, kind, text = FAULTS[what]
    with pytest.raises(kind) as caught:
        build.locate(path)
    assert str(caught.value) == text


def test_an_error_inside_a_module_is_passed_on(tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import not_there_at_all")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'not_there_at_all'$"):
        build.locate("needs_more.X")


def test_an_unknown_parameter_is_named():
    with pytest.raises(TypeError) as caught:
        build.construct({"class": RBF_PATH, "lenght_scale": 1.0})
    text = "build: RBF has no parameter 'lenght_scale'. Did you mean 'length_scale'?"
    assert str(caught.value) == text
    with pytest.raises(TypeError, match=r"RBF has no parameter 'z'. It takes length_scale.$"):
        build.construct({"class": RBF_PATH, "z": 1.0})


def test_what_is_not_a_class_is_refused():
    with pytest.raises(TypeError, match=r"'math.pi' must be a class, got float"):
        build.construct({"class": "math.pi"})
