from __future__ import annotations

import base64
import csv
import json
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser

import matplotlib
import numpy as np
import pytest
import scipy.stats
from harness.toy_runs import FROZEN, go, toy
from tolerances import tolerance

from kernrl.harness.reporting import number, report

AGENT = "harness.toy_agents."
WILD = "<i>steady & co"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Two environments, a learner, an agent with a wild name, one that always crashes."""
    config = toy(
        {"agent": AGENT + "TabularQ"},
        {"agent": AGENT + "Constant", "name": WILD, "params": {"action": 1}},
        {"agent": AGENT + "Constant", "name": "crashes", "params": {"crash_at": 10}},
        seeds=3,
        description="What a report must show.",
    )
    taxi = {"id": "Taxi-v4", "kwargs": {"max_episode_steps": 20}}
    return go(config | {"envs": [FROZEN, taxi]}, tmp_path_factory.mktemp("runs"), jobs=2)


@pytest.fixture(scope="module")
def page(run):
    return report(run.folder).html.read_text(encoding="utf-8")


class Reader(HTMLParser):
    """Collects what a test wants to know, and that every element is closed."""

    VOID = frozenset({"meta", "link", "img", "br"})

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.images, self.text = [], [], set(), [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        if tag not in self.VOID:
            self.open.append(tag)
        self.links += [found[key] for key in ("href", "src") if key in found]
        self.ids |= {found["id"]} if "id" in found else set()
        self.images += [found] if tag == "img" else []

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_needs_nothing_from_outside(page):
    reader = Reader(page)
    assert all(link.startswith(("data:", "#")) for link in reader.links)
    assert {link[1:] for link in reader.links if link.startswith("#")} <= reader.ids
    assert "http" not in page.replace("http-equiv", "")
    assert "@import" not in page
    assert "url(" not in page


def pictures_in(page):
    prefix = "data:image/svg+xml;base64,"
    images = Reader(page).images
    assert all(image["src"].startswith(prefix) for image in images)
    return [base64.b64decode(image["src"].removeprefix(prefix)).decode() for image in images]


def test_every_environment_has_four_pictures_that_stand_alone(page):
    svgs = pictures_in(page)
    assert len(svgs) == 2 * 4
    assert all(image["alt"] for image in Reader(page).images)
    for svg in svgs:
        assert svg.startswith("<svg")
        links = re.findall(r'(?:href|src)="([^"]*)"', svg)
        assert all(link.startswith("#") for link in links)
        assert set(re.findall(r'http[^"]*', svg)) <= {
            "http://www.w3.org/2000/svg",
            "http://www.w3.org/1999/xlink",
        }


def test_pictures_follow_light_and_dark(page):
    for svg in pictures_in(page):
        rules, drawing = svg.split("</style>", 1)
        assert "prefers-color-scheme:dark" in rules
        assert "#24292f" not in drawing
        assert "var(--c24292f)" in drawing
    assert "prefers-color-scheme: dark" in page


def test_the_page_says_what_a_reader_must_know(page, run):
    text = " ".join(" ".join(Reader(page).text).split())
    for wanted in (
        "What a report must show.",
        run.manifest["command"],
        run.manifest["hash"],
        run.manifest["versions"]["numpy"],
        run.manifest["machine"]["processor"],
        "12 of 18",
        "6 of 18 runs failed",
        "No run of crashes finished in this environment.",
        "ArithmeticError: the sum is off",
        "in update",  # from the traceback
        "stratified bootstrap t",
        "FrozenLake-v1 (is_slippery=False, max_episode_steps=30)",
        "Reached 0.7",
        WILD,
    ):
        assert wanted in text, wanted
    assert "<i>" not in page


def test_the_table_agrees_with_the_episodes(run, page):
    """Recomputed from results.csv by SciPy."""
    returns = defaultdict(lambda: defaultdict(list))
    with (run.folder / "results.csv").open() as file:
        for row in csv.DictReader(file):
            if row["stream"] == "report":
                returns[row["env"], row["agent"]][row["seed"]].append(float(row["return"]))
    with (run.folder / "tables" / "scores.csv").open() as file:
        scores = {(row["env"], row["agent"]): row for row in csv.DictReader(file)}
    assert scores.keys() == returns.keys()
    for key, runs in returns.items():
        means = [np.mean(episodes) for episodes in runs.values()]
        assert len(means) == 3
        got = [float(scores[key][name]) for name in ("iqm", "median", "mean", "worst")]
        iqm = scipy.stats.trim_mean(means, 0.25)
        expected = [iqm, np.median(means), np.mean(means), min(means)]
        np.testing.assert_allclose(got, expected, **tolerance("closed form"))
        assert number(iqm) in page


def test_pictures_and_tables_lie_beside_the_page(run):
    found = report(run.folder)
    assert found.html == run.folder / "report.html"
    assert {path.name for path in found.tables} == {"scores.csv", "runs.csv", "curves.csv"}
    pngs = [path for path in found.pictures if path.suffix == ".png"]
    assert len(pngs) == 9
    for path in pngs:
        assert path.read_bytes().startswith(b"\x89PNG")
        pixels = matplotlib.image.imread(path)
        assert pixels.shape[0] > 500
        assert pixels[0, 0].tolist() == [1, 1, 1, 1]  # white paper
        assert (pixels[..., :3].max(axis=-1) < 0.5).sum() > 500  # and ink on it


def test_a_report_is_a_function_of_its_folder(run, page, tmp_path):
    copy = tmp_path / "elsewhere"
    shutil.copytree(run.folder, copy)
    for path in ("report.html", "figures", "tables"):
        target = copy / path
        shutil.rmtree(target) if target.is_dir() else target.unlink()
    assert report(copy).html.read_text(encoding="utf-8") == page


def test_the_users_matplotlib_is_left_alone(run):
    before = dict(matplotlib.rcParams)
    report(run.folder)
    assert dict(matplotlib.rcParams) == before


@pytest.fixture
def small(run, tmp_path):
    """A copy of the run whose plan can be cut down."""
    copy = tmp_path / "small"
    shutil.copytree(run.folder, copy)

    def keep(wanted):
        plan = json.loads((copy / "experiment.json").read_text())
        plan["cells"] = [cell["id"] for cell in run.cells if wanted(cell)]
        (copy / "experiment.json").write_text(json.dumps(plan))
        return copy

    return keep


def test_two_runs_get_no_interval(small):
    folder = small(lambda cell: cell["seed"] < 2 and cell["agent"] == "TabularQ")
    text = report(folder).html.read_text()
    assert text.count("needs 3 runs") == 2
    assert "Intervals:" not in text
    assert 'id="comparison"' not in text


def test_one_run_can_be_reported(small):
    folder = small(lambda cell: cell["seed"] == 0 and cell["agent"] == "TabularQ")
    assert report(folder).html.is_file()


def test_nothing_finished_is_an_error(small):
    folder = small(lambda cell: cell["agent"] == "crashes")
    with pytest.raises(ValueError, match=r"report: at least one cell must have finished, got Arit"):
        report(folder)


def test_a_folder_that_is_no_run_is_an_error(tmp_path):
    text = f"run: a run folder must hold manifest.json, got none in '{tmp_path}'. kernrl run prints"
    with pytest.raises(FileNotFoundError, match=re.escape(text)):
        report(tmp_path)


def test_a_damaged_cell_is_named(small, run):
    folder = small(lambda cell: True)
    path = folder / "cells" / run.cells[0]["id"] / "cell.json"
    path.write_text("{")
    with pytest.raises(ValueError, match=r"run: a file is not readable, got .*--resume"):
        report(folder)


@pytest.mark.parametrize(
    ("x", "text"),
    [(None, "–"), (float("nan"), "–"), (0.0, "0"), (-1234.5, "−1234"), (123456.0, "123 456")],
)
def test_numbers_are_for_reading(x, text):
    assert number(x) == text


# ---------------------------------------------------------------- in a browser

CHROMIUM = next((p for p in map(shutil.which, ("chromium", "chromium-browser")) if p), None)
PROBE = """<script>addEventListener("load", () => {
const images = [...document.images].map(i => [i.naturalWidth, i.getBoundingClientRect().height]);
const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
document.body.dataset.seen = JSON.stringify({images, wide, requests: performance
  .getEntriesByType("resource").map(r => r.name).filter(n => !n.startsWith("data:"))});
});</script></body>"""


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [500, 1280])
def test_a_browser_shows_every_picture(page, width, tmp_path):
    """Loaded, drawn, nothing fetched, no complaint on the console, nothing sticks out."""
    (tmp_path / "page.html").write_text(page.replace("</body>", PROBE), encoding="utf-8")
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--disable-background-networking", f"--user-data-dir={tmp_path / 'profile'}"]
    command += ["--enable-logging=stderr", f"--window-size={width},900", "--timeout=20000"]
    done = subprocess.run(
        [*command, f"file://{tmp_path / 'page.html'}"], capture_output=True, text=True, timeout=120
    )
    seen = re.search(r'data-seen="([^"]*)"', done.stdout)
    assert seen, done.stderr[-2000:]
    found = json.loads(seen[1].replace("&quot;", '"'))
    assert len(found["images"]) == 8
    assert all(natural > 100 and height > 100 for natural, height in found["images"])
    assert found["requests"] == []
    assert found["wide"] == 0
    assert "CONSOLE" not in done.stderr
