"""`prefixflow plan --html`: the page holds the plan, opens without a network, and a browser draws all of it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from prefixflow.cli import main
from prefixflow.html import payload as page_payload
from prefixflow.palette import COLOURS
from prefixflow.plan.cost import CostModel, MeasuredCosts, Rates
from prefixflow.plan.plan import PlanConfig
from prefixflow.plan.shapes import ModelShape
from prefixflow.schedule.memory import MemoryModel, Phase
from prefixflow.schedule.ops import Kind
from prefixflow.schedule.search import plan_pipeline
from prefixflow.testing.generate import Style, mixed_workload, trees, two_level_groups
from prefixflow.trajectories import write_trajectories

NASTY = 'task </script><img src=x> & "\u2028'
LAYOUT = ("--model", "tiny", "--pp", "2", "--vpp", "2", "--dp", "2", "--max-tokens", "48")
PAPER = {"light": "#fcfcfb", "dark": "#12161c"}
NOISE = re.compile(r":INFO:CONSOLE|:ERROR:CONSOLE|Uncaught")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two trees of three branches with three leaves each, and all shapes; one name would end a careless script element."""
    path = tmp_path_factory.mktemp("html") / "mixed.jsonl"
    style = Style(vocab_size=512)
    named = [
        replace(t, id=f"{t.id} {NASTY}", group=NASTY if t.group == "t0" else "other tree")
        for t in trees(2, depth=2, branching=3, segment_tokens=40, seed=1, style=style)
    ]
    write_trajectories(path, [*named, *mixed_workload(style=style)])
    return path


@pytest.fixture(scope="module")
def page(file: Path) -> Path:
    path = file.with_name("page.html")
    assert main(["plan", str(file), *LAYOUT, "--html", str(path)]) == 0
    return path


class _Payload(HTMLParser):
    """Text of the element with the id `payload`, as a browser would find it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._is_inside = False
        self.text = ""
        self.elements: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append(tag)
        self._is_inside = ("id", "payload") in attrs

    def handle_data(self, data: str) -> None:
        self.text += data if self._is_inside else ""

    def handle_endtag(self, tag: str) -> None:
        self._is_inside = False


def payload_of(page: Path) -> dict[str, Any]:
    return json.loads(_Payload(page.read_text()).text)


def segments_of(data: dict[str, Any]) -> np.ndarray:
    """[segments, (parent, tokens, trajectories, microbatch, loss rows, written, trajectory)]"""
    return np.asarray(data["forest"]["segments"]).reshape(-1, 7)


def test_page_and_json_are_of_one_plan(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["plan", str(file), *LAYOUT, "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = payload_of(page)
    segments = segments_of(data)
    tokens, members = segments[:, 1], segments[:, 2]
    assert tokens.sum() == report["computed_tokens"]
    assert (tokens * members).sum() == report["logical_tokens"]
    profile = data["forest"]["profile"]
    assert profile["width"] == 1
    assert sum(profile["computed"]) == report["computed_tokens"]
    assert sum(profile["logical"]) == report["logical_tokens"]
    assert sum(profile["shared"]) == tokens[members > 1].sum()
    assert [r["load"] for r in data["replicas"]] == report["rank_loads"]
    assert sum(r["microbatches"] for r in data["replicas"]) == report["microbatches"]
    slowest = max(data["replicas"], key=lambda r: r["makespan"])
    assert slowest["busy"] == report["pipeline_efficiency"]
    assert report["digest"] in page.read_text()


def test_rows_hold_every_operation_once_and_fill_the_time(page: Path) -> None:
    data = payload_of(page)
    ends = []
    for replica in data["replicas"]:
        num_microbatches = len(replica["mb"])
        for flat in replica["rows"]:
            code, microbatch, idle, takes = np.asarray(flat).reshape(-1, 4).T
            expected = {(c, m) for c in range(4) for m in range(num_microbatches)}
            assert len(code) == len(expected)
            assert set(zip(code.tolist(), microbatch.tolist(), strict=True)) == expected
            assert (idle >= 0).all()
            ends.append((idle + takes).sum())
    assert max(ends) == data["ticks"]


def test_memory_peaks_are_those_of_the_report(file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert main(["plan", str(file), *LAYOUT, "--html", str(page), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    data = payload_of(page)
    for phase, size in report["peak_bytes"].items():
        peaks = [m["peaks"][phase][1] for r in data["replicas"] for m in r["memory"] if phase in m["peaks"]]
        # The page has the state of the pipeline rank with most, the report that of each.
        assert max(peaks) + data["stateBytes"] == pytest.approx(size, rel=1e-3)
    replica = data["replicas"][0]
    for memory in replica["memory"]:
        totals = np.asarray(memory["points"]).reshape(-1, 7)[:, 1:].sum(axis=1) * replica["levelBytes"]
        largest = max(size for _, size, _ in memory["peaks"].values())
        assert abs(totals.max() - largest) <= 3 * replica["levelBytes"]
        assert all(size == sum(held) for _, size, held in memory["peaks"].values())
    # Only the last stage has logits; both get messages.
    logits, messages = ([max(p[2][i] for p in m["peaks"].values()) for m in replica["memory"]] for i in (3, 4))
    assert not logits[0]
    assert all(messages)


def test_page_is_self_contained(page: Path) -> None:
    text = page.read_text()
    assert not re.search(
        r"https?:|url\(|@import|\bsrc=|\bhref=|fetch\(|XMLHttpRequest", re.sub(r"\\u003cimg src=", "", text)
    )
    # Nothing of a name became an element or ended one.
    assert "img" not in _Payload(text).elements
    assert text.count("</script>") == 2
    assert payload_of(page)["forest"]["trees"][0][0] == NASTY


def test_what_exceeds_a_limit_is_counted_and_stays_whole(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_payload, "MAX_SEGMENTS", 20)
    monkeypatch.setattr(page_payload, "MAX_OPERATIONS", 24)
    monkeypatch.setattr(page_payload, "MAX_MEMORY_POINTS", 8)
    page = tmp_path / "page.html"
    assert main(["plan", str(file), *LAYOUT, "--html", str(page)]) == 0
    data = payload_of(page)
    segments = segments_of(data)
    assert len(segments) == 20 < data["forest"]["numSegments"]
    assert (segments[:, 0] < np.arange(20)).all()
    assert sum(size for _, _, size in data["forest"]["trees"]) == 20
    drawn = [r for r in data["replicas"] if "rows" in r]
    assert len(drawn) == 1
    assert drawn[0]["makespan"] == 1.0
    assert [len(row) // 4 for row in drawn[0]["rows"]] == [12, 12] < [drawn[0]["operations"]]
    assert [len(m["points"]) // 7 for m in drawn[0]["memory"]] == [4, 4]


def test_names_of_many_characters_are_cut(tmp_path: Path) -> None:
    path, page = tmp_path / "long.jsonl", tmp_path / "page.html"
    trajectories = two_level_groups(1, 2, style=Style(vocab_size=512))
    write_trajectories(path, [replace(t, group="g" * 5_000) for t in trajectories])
    assert main(["plan", str(path), "--model", "tiny", "--html", str(page)]) == 0
    assert payload_of(page)["forest"]["trees"][0][0] == "g" * 79 + "…"


@pytest.mark.parametrize(
    ("name", "words"), [("no/page.html", "folder"), (".", "name of a file"), ("in.jsonl", "is read")]
)
def test_a_bad_place_is_refused_before_planning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    source = tmp_path / "in.jsonl"
    write_trajectories(source, two_level_groups(1, 2, style=Style(vocab_size=512)))
    before = source.read_bytes()
    assert main(["plan", str(source), "--model", "tiny", "--html", str(tmp_path / name)]) == 2
    assert words in capsys.readouterr().err
    assert source.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize(("measured", "unit"), [(None, "FLOP"), (MeasuredCosts(Rates(1e-3), Rates(2e-3)), "s")])
def test_time_is_in_the_unit_of_the_costs(measured: MeasuredCosts | None, unit: str) -> None:
    trajectories = two_level_groups(1, 2, prefix_tokens=11, suffix_tokens=5)
    plan = plan_pipeline(trajectories, PlanConfig(cost=CostModel(linear=1e6), measured=measured))
    step = page_payload.PlannedStep(plan, trajectories, MemoryModel(ModelShape.from_name("tiny")))
    data = page_payload.payload(step)
    assert data["unit"] == unit
    assert (data["stepCost"] < 1) == (unit == "s")


# Machado, Oliveira and Fernandes (2009), severity 1, in linear RGB.
BLINDNESS = {
    "none": np.eye(3),
    "red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def rgb(colour: str) -> np.ndarray:
    return np.asarray([int(colour[i : i + 2], 16) for i in (1, 3, 5)])


def linear(colour: str) -> np.ndarray:
    c = rgb(colour) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(light: np.ndarray) -> np.ndarray:
    """CIE L*a*b* under D65 of linear RGB."""
    to_xyz = np.asarray([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(light, 0, 1) / (0.9505, 1, 1.089)
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.asarray([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_stay_apart_for_the_colour_blind(kind: str) -> None:
    seen = [lab(np.asarray(BLINDNESS[kind]) @ linear(colour)) for colour in COLOURS.values()]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) > 15


PROBE = """<script type="module">
const probe = (id, x, y) => {
  const canvas = document.getElementById(id);
  const box = canvas.getBoundingClientRect();
  const at = { clientX: box.left + x, clientY: box.top + y, bubbles: true };
  canvas.dispatchEvent(new PointerEvent("pointermove", at));
  const tip = [...document.getElementById("tip").children].map((line) => line.textContent).join("|");
  canvas.dispatchEvent(new PointerEvent("pointerleave", at));
  return { tip, box: [box.left, box.top, box.right, box.bottom].map(Math.round) };
};
const found = Object.fromEntries([["timeline", 113, 5], ["forest-canvas", 114, 3], ["memory-canvas", 130, 100]]
  .map(([id, x, y]) => [id, probe(id, x, y)]));
// Down the middle of the plot, between a left gutter of 112 and a right one of 92 pixels: the branches of the first tree.
const canvas = document.getElementById("forest-canvas");
found.branches = [];
for (let y = 1; y < canvas.clientHeight; y += 2) found.branches.push(probe("forest-canvas", canvas.clientWidth / 2 + 10, y).tip);
const pre = document.createElement("pre");
pre.id = "probe";
pre.textContent = JSON.stringify(found).replaceAll("<", "\\\\u003c");
document.body.append(pre);
</script>"""


class Rendering:
    """What Chromium makes of a page: the counts that the script set, what hovering says, console lines, pixels."""

    def __init__(self, page: Path, theme: str, folder: Path) -> None:
        chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
        if chromium is None:
            pytest.skip("needs Chromium (chromium, chromium-browser or google-chrome on the path)")
        import matplotlib.image

        probed = folder / f"{theme}.html"
        probed.write_text(page.read_text().replace("</body>", PROBE + "</body>"))
        picture = folder / f"{theme}.png"
        options = (
            "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking --hide-scrollbars "
            "--disable-component-update --disable-sync --window-size=1200,2400 --virtual-time-budget=4000 "
            f"--blink-settings=preferredColorScheme={('dark', 'light').index(theme)} --enable-logging=stderr --v=0 --dump-dom"
        )
        command = [chromium, *options.split(), f"--user-data-dir={folder / theme}", f"--screenshot={picture}"]
        done = subprocess.run([*command, probed.as_uri()], capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        root = re.search(r"<html[^>]*>", done.stdout)
        found = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.DOTALL)
        assert root, done.stderr[-2000:]
        assert found, done.stderr[-2000:]
        self.asked_theme = theme
        self.console = [line for line in done.stderr.splitlines() if NOISE.search(line)]
        self.theme = re.search(r'data-theme="(\w+)"', root[0])[1]  # type: ignore[index]
        self.counts = {name: int(n) for name, n in re.findall(r'data-([a-z-]+)="(\d+)"', root[0])}
        self.probe = json.loads(found[1].replace("&amp;", "&").replace("&lt;", "<").replace("&gt;", ">"))
        self.pixels = (matplotlib.image.imread(picture)[:, :, :3] * 255).round().astype(int)

    def share(self, colour: str, of: str) -> float:
        """Share of the pixels of the canvas `of` that have exactly this colour."""
        left, top, right, bottom = self.probe[of]["box"]
        area = self.pixels[top:bottom, left:right]
        return float((area == rgb(colour)).all(axis=-1).mean())


@pytest.fixture(scope="module", params=["light", "dark"])
def rendering(request: pytest.FixtureRequest, page: Path, tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return Rendering(page, request.param, tmp_path_factory.mktemp("chromium"))


def test_browser_draws_all_of_the_plan(rendering: Rendering, page: Path) -> None:
    data = payload_of(page)
    replica = max(data["replicas"], key=lambda r: r["makespan"])
    dummies = [m for m, (tokens, _, _) in enumerate(replica["mb"]) if not tokens]
    num_dummies = sum(m in dummies for row in replica["rows"] for m in row[1::4])
    gaps = sum(
        np.count_nonzero(row[2::4]) + (sum(row[2::4]) + sum(row[3::4]) < data["ticks"]) for row in replica["rows"]
    )
    assert rendering.console == []
    assert num_dummies > 0
    assert rendering.counts == {
        "ready": 1,
        "replicas": 2,
        "segments": data["forest"]["numSegments"],
        "segments-drawn": data["forest"]["numSegments"],
        "profile-bins": data["forest"]["profile"]["end"],
        "operations": sum(len(row) // 4 for row in replica["rows"]) - num_dummies,
        "dummies": num_dummies,
        "bubbles": gaps,
        "memory-points": max(len(m["points"]) // 7 for m in replica["memory"]),
        "memory-peaks": sum(len(m["peaks"]) for m in replica["memory"]),
    }


def test_browser_shows_both_themes_and_every_phase(rendering: Rendering) -> None:
    assert rendering.theme == rendering.asked_theme
    paper = PAPER[rendering.theme]
    assert (rendering.pixels[2, 2] == rgb(paper)).all()
    for colour in COLOURS.values():
        assert rendering.share(colour, "timeline") > 0.01, colour
    assert rendering.share(COLOURS[Phase.SUFFIX, Kind.FORWARD], "forest-canvas") > 0.02
    assert rendering.share(paper, "memory-canvas") < 0.95


def test_browser_says_what_is_under_the_pointer(rendering: Rendering) -> None:
    tips = {name: found["tip"].split("|") for name, found in rendering.probe.items() if name != "branches"}
    operation = tips["timeline"]
    assert operation[0] == "0F0: forward of microbatch 0 on stage 0"
    assert operation[1].startswith(("A: prefix forward", "B: suffix forward"))
    assert re.fullmatch(r"\d+\.\d\d % of the step, [\d.]+ [kMGTP]?FLOP", operation[2])
    segment = tips["forest-canvas"]
    assert segment[0].startswith(f"{NASTY}: ")
    assert segment[1].startswith("9 trajectories: ")
    assert segment[2].startswith("saves ")
    branches = [tip for tip in rendering.probe["branches"] if tip.startswith(NASTY)]
    heights = [branches.count(tip) for tip in dict.fromkeys(branches)]
    assert len(heights) == 3, "a branch is as tall as its trajectories, and below the one before it"
    assert max(heights) - min(heights) <= 1
    memory = tips["memory-canvas"]
    assert [line.split(":")[0] for line in memory[1:7]] == [
        "in work",
        "communication",
        "logits",
        "activations",
        "K/V",
        "gK/gV",
    ]
