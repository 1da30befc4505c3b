"""The report of runs: what is on the page, what is refused, and how a browser shows it."""

import base64
import dataclasses
import hashlib
import html.parser
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pfedafm_jax import plots, run
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.records import digest
from pfedafm_jax.report import page, write_report
from pfedafm_jax.results import read_run

ROOT = Path(__file__).parent.parent
HOSTILE = """python run.py --x '<script>alert("1")</script>' && $a_b$"""


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory) -> Path:
    settings = dataclasses.replace(config, synthetic_samples=240, architectures=("small_b",), eval_every=2)
    folder = tmp_path_factory.mktemp("runs") / "first"
    run(settings, run_dir=folder, command=HOSTILE, progress=False)
    return folder


@pytest.fixture
def copied(finished, tmp_path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def changed(folder: Path, **settings) -> Path:
    """The run as if it had been made with other settings."""
    names = [name for name in ("config.json", "summary.json") if (folder / name).exists()]
    for name in names:
        content = json.loads((folder / name).read_text())
        content["config"] |= settings
        if name == "summary.json":
            content |= {"method": content["config"]["method"]}
            whole = (folder / "config.json").read_bytes()
            content["files"]["config.json"] = hashlib.sha256(whole).hexdigest()
        (folder / name).write_text(json.dumps({**content, "sha256": digest(content)}))
    return folder


def unfinished(folder: Path, rounds: int) -> Path:
    for name in ("summary.json", "clients.npz", "accuracy.png", "split.png"):
        (folder / name).unlink()
    lines = (folder / "rounds.jsonl").read_text().splitlines(keepends=True)
    (folder / "rounds.jsonl").write_text("".join(lines[:rounds]) + lines[rounds][:30])
    return folder


def written(out: Path, *folders: Path) -> str:
    write_report(list(folders), out)
    return out.read_text(encoding="utf-8")


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order; keeps tags with attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in ("img", "meta"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data if not self.open or self.open[-1] != "style" else ""

    def all(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def test_a_page_has_the_numbers_settings_and_pictures_of_the_run(finished, tmp_path):
    text = written(tmp_path / "one.html", finished)
    found, summary = Page(text), json.loads((finished / "summary.json").read_text())
    for name in ("best_mean_accuracy", "last_ten_mean_accuracy", "final_all_clients_accuracy", "spread_over_clients"):
        assert f"{100 * summary[name]:.2f} %" in found.text
    last = json.loads((finished / "rounds.jsonl").read_text().splitlines()[-1])
    for name in ("mixed", "small", "large"):
        suffix = "" if name == "mixed" else f"/{name}"
        assert f"{name} model" in found.text
        for kind in ("mean_accuracy", "all_clients_accuracy"):
            assert f"{100 * last[kind + suffix]:.2f} %" in found.text
    with np.load(finished / "clients.npz") as table:
        weighted = np.average(table["all_clients/accuracy"][-1], weights=table["num_test"])
    assert f"{100 * weighted:.2f} %" in found.text
    assert (
        found.text.index("feature_size") < found.text.index("settings as by default") < found.text.index("weight_decay")
    )
    assert [image["alt"] for image in found.all("img")] == [
        "accuracy by round",
        "accuracy of each client",
        "mean of the mix vector by round",
        "images of each class at each client",
    ]


def test_a_page_needs_nothing_else_and_is_the_same_again(finished, tmp_path):
    text = written(tmp_path / "one.html", finished)
    found = Page(text)
    assert not any(found.all(tag) for tag in ("script", "link", "iframe", "object"))
    for image in found.all("img"):
        kind, content = image["src"].split(";base64,")
        assert kind == "data:image/svg+xml" and base64.b64decode(content).startswith(b"<?xml")
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text).replace("http-equiv", "")
    assert written(tmp_path / "again.html", finished) == text


def test_everything_is_escaped(copied, tmp_path):
    folder = copied.rename(tmp_path / """_<b>&"'$x_y$""")
    text = written(tmp_path / "one.html", folder, changed(shutil.copytree(folder, tmp_path / "b"), method="<i>mine"))
    found = Page(text)
    assert not found.all("script") and not found.all("i") and '<script>alert("1")' in found.text
    assert folder.name in found.text and "<i>mine" in found.text


def test_several_runs_are_compared_first(finished, copied, tmp_path):
    third = unfinished(changed(Path(shutil.copytree(finished, tmp_path / "third")), momentum=0.5), rounds=2)
    text = written(tmp_path / "three.html", finished, changed(copied, seed=7), third)
    found = Page(text)
    assert found.text.index("Where their settings differ") < found.text.index("1 · first: pFedAFM")
    assert "2 of 3" in found.text and "This run is unfinished: 2 of 3 rounds are there" in found.text
    differ = found.text[found.text.index("Where their settings differ") : found.text.index("Over seeds")]
    assert "momentum" in differ and "seed" in differ and "batch_size" not in differ
    assert "± 0.00" in found.text and "5, 7" in found.text  # the same run under two seeds
    assert [heading["id"] for heading in found.all("h2")] == ["run-1", "run-2", "run-3"]
    assert len(found.all("img")) == 2 + 4 + 4 + 2


def test_an_unfinished_run_without_a_round_has_its_settings(copied, tmp_path):
    unfinished(copied, rounds=0)
    found = Page(written(tmp_path / "one.html", copied))
    assert "0 of 3 rounds are there" in found.text and "feature_size" in found.text
    assert [image["alt"] for image in found.all("img")] == ["images of each class at each client"]


def test_the_split_is_taken_from_the_runs_own_picture_where_the_data_is_another(finished, tmp_path):
    run = read_run(finished)
    other = {**run.about, "data": {**run.about["data"], "digest": "of other data"}}
    image = Page(page([dataclasses.replace(run, about=other)])).all("img")[-1]
    assert base64.b64decode(image["src"].split(",")[1]) == (finished / "split.png").read_bytes()


def test_a_picture_that_cannot_be_drawn_costs_a_line(finished, monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("no <ink>")

    monkeypatch.setattr(plots, "mix_by_round", broken)
    found = Page(page([read_run(finished)]))
    assert len(found.all("img")) == 3
    assert "The picture mix could not be drawn (ValueError: no <ink>)." in found.text


def test_published_numbers_stand_beside_the_runs(finished):
    run = read_run(finished)
    assert "95.68 %" in page([run], published=lambda config: ("Table 3", 0.9568))
    both = Page(page([run, run], published=lambda config: ("Table 3", None)))
    assert both.text.count("no convergence") == 4 and "Table 3" in both.text


def test_the_command_writes_the_page_and_says_what_is_wrong(finished, tmp_path, monkeypatch, capsys):
    command = ROOT / "experiments" / "report.py"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [str(command), str(finished)])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(command), run_name="__main__")
    assert not ended.value.code and (tmp_path / "report.html").stat().st_size > 50_000
    assert "best mean of participants" in " ".join(capsys.readouterr().out.split())  # wrapped where the path is long

    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80"}
    words = [sys.executable, str(command), str(tmp_path / "nothing")]
    wrong = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert wrong.returncode == 2 and "there is no such folder" in wrong.stderr and "Traceback" not in wrong.stderr


def test_what_cannot_be_written_or_read_is_said(finished, tmp_path):
    with pytest.raises(PfedafmError, match=r"ends in \.html"):
        write_report([finished], finished / "rounds.jsonl")
    with pytest.raises(PfedafmError, match=r"it has no config\.json"):
        write_report([tmp_path], tmp_path / "report.html")
    with pytest.raises(PfedafmError, match="data_dir = '/nowhere'"):
        write_report([finished], tmp_path / "report.html", data_dir="/nowhere")


# ---------------------------------------------------------------------------------------------- in a browser

MEASURE = """<body style="margin:0"><script>
const page = %s;
async function measured(width) {
  const frame = document.createElement("iframe");
  frame.style = `border:0;width:${width}px;height:900px`;
  const shown = new Promise(done => frame.onload = done);
  frame.srcdoc = page;
  document.body.append(frame);
  await shown;
  const inside = frame.contentDocument;
  const images = [...inside.images].map(image => {
    const box = image.getBoundingClientRect();
    return [image.naturalWidth, box.x, box.y, box.width, box.height];
  });
  const found = {wide: inside.documentElement.scrollWidth, high: inside.documentElement.scrollHeight, images};
  frame.remove();
  return found;
}
Promise.all([1100, 390].map(measured)).then(all => document.body.textContent = JSON.stringify(all));
</script>"""


def browser(*arguments: str) -> str:
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    program = next(filter(None, map(shutil.which, names)), None)
    if program is None:
        pytest.skip("no Chromium on this machine")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=10000"]
    result = subprocess.run([program, *flags, *arguments], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


def test_a_browser_shows_every_picture_on_a_desk_and_on_a_phone(finished, tmp_path):
    text = written(tmp_path / "report.html", finished)
    (tmp_path / "measure.html").write_text(MEASURE % json.dumps(text).replace("</", "<\\/"))
    dom = browser("--dump-dom", f"file://{tmp_path}/measure.html")
    desk, phone = json.loads(dom[dom.index("[{") : dom.rindex("}]") + 2])
    assert desk["wide"] == 1100 and phone["wide"] == 390  # nothing sticks out
    assert len(desk["images"]) == len(phone["images"]) == 4
    assert all(image[0] > 0 for image in desk["images"] + phone["images"])
    assert all(340 < image[3] <= 390 for image in phone["images"])

    picture = tmp_path / "page.png"
    browser(f"--screenshot={picture}", f"--window-size=1100,{desk['high']}", f"file://{tmp_path}/report.html")
    with Image.open(picture) as shown:
        for _, x, y, width, height in desk["images"]:
            part = np.asarray(shown.convert("RGB").crop((round(x), round(y), round(x + width), round(y + height))))
            colours = len(np.unique(part.reshape(-1, 3), axis=0))
            inked = np.mean(np.any(part < 200, axis=-1))
            assert colours > 50 and 0.01 < inked < 0.9, (colours, inked)
