"""The report of runs: what is on the page, that it needs nothing else, that all is escaped."""

import base64
import html.parser
import re
from dataclasses import replace

import numpy as np
import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli.commands import report
from pfedafm_jax.results import plots, style
from pfedafm_jax.results.page import page, write_report

HOSTILE = """<script>alert("1")</script> && $a_b$ 'x"""
SCORES = np.array([0.5, 0.7, 0.9])
SETTINGS = {"num_clients": 3, "participation": 0.67, "rounds": 4, "dataset": "synthetic"}


def made(folder=None, finished=True, **settings):
    """Four rounds of pFedAFM, evaluated at the end: mixed 70 %, small 60 %, large 40 %."""
    parts = {"mean_accuracy/small": 0.5, "mean_accuracy/large": 0.25}
    rounds = [record(number, 0.2 * number, **parts) for number in range(1, 4)]
    everyone = {"all_clients_accuracy/small": 0.6, "all_clients_accuracy/large": 0.4}
    rounds.append(record(4, 0.75, everyone=0.7, not_finite=1, **parts, **everyone))
    run = run_by_hand(
        rounds if finished else rounds[:2], folder, finished=finished, last_accuracies=SCORES,
        visits={"mix_mean": np.full((4, 3), 0.5)}, **SETTINGS | settings,
    )  # fmt: skip
    arrays = {f"all_clients/accuracy/{name}": SCORES[None] for name in ("small", "large")}
    return run if folder else replace(run, arrays={**run.arrays, **arrays})


class Page(html.parser.HTMLParser):
    """Checks that tags are closed in order; keeps tags with attributes, and the text."""

    def __init__(self, text: str):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""
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


def test_a_page_has_the_numbers_settings_and_pictures_of_the_run():
    found = Page(page([made()], lambda config: ("Table 3", 0.9568)))
    # Best, mean of the last ten, all clients, spread; small and large model.
    for number in ("75.00", "48.75", "70.00", "16.33", "60.00", "40.00", "95.68"):
        assert f"{number} %" in found.text, number
    assert "small model" in found.text and "Table 3" in found.text
    assert "kept out: 1, the first in round 4" in found.text and "by hand" in found.text
    own, usual = found.text.split("settings as by default")
    assert "participation" in own and "momentum" in usual
    assert [image["alt"] for image in found.all("img")] == [
        "accuracy by round", "accuracy of each client", "mean of the mix vector by round",
    ]  # fmt: skip


def test_a_page_needs_nothing_else_and_is_the_same_again(tmp_path):
    made(tmp_path / "run", method="fd")
    picture = style.rendered(plots.classes_by_client(np.ones((3, 4))), "png")
    (tmp_path / "run" / "split.png").write_bytes(picture)  # as the run leaves it
    text = []
    for _ in range(2):
        write_report([tmp_path / "run"], tmp_path / "one.html")
        text.append((tmp_path / "one.html").read_text())
    found = Page(text[0])
    assert text[0] == text[1]
    assert not any(found.all(tag) for tag in ("script", "link", "iframe", "object"))
    assert "http" not in re.sub(r"base64,[\w+/=]+", "", text[0]).replace("http-equiv", "")
    content = [base64.b64decode(image["src"].split(";base64,")[1]) for image in found.all("img")]
    assert all(one.startswith(b"\x89PNG") for one in content) and content[-1] == picture


def test_everything_is_escaped():
    run = made(dataset=f"folder:{HOSTILE}")
    hostile = {"command": HOSTILE, "predictions": [HOSTILE, "small", "large"]}
    run = replace(run, about={**run.about, **hostile})
    found = Page(page([run, run]))
    assert not found.all("script") and found.text.count(HOSTILE) >= 4


def test_several_runs_are_compared_first():
    own = {"learning_rate": 0.0}
    runs = [made(seed=5), made(seed=7), made(finished=False, momentum=0.5, pfedafm=own)]
    found = Page(page(runs, lambda config: ("Table 3", None)))
    first = found.text.index("1 · pfedafm-seed5: pFedAFM on synthetic")
    assert found.text.index("Where their settings differ") < first
    assert "2 of 4" in found.text
    assert "This run is unfinished: 2 of 4 rounds are there" in found.text
    differ = found.text.split("Where their settings differ")[1].split("Over seeds")[0]
    assert "momentum" in differ and "seed" in differ and "batch_size" not in differ
    assert "pfedafm.learning_ratenonenone0.0" in differ  # a row of the table
    assert "learning rate 0.0, seed" in found.text
    assert "75.00 ± 0.00" in found.text and "no convergence" in found.text
    assert [heading["id"] for heading in found.all("h2")] == ["run-1", "run-2", "run-3"]


def test_settings_that_only_unfinished_runs_have_do_not_stop_the_page():
    runs = [made(seed=5), made(seed=7)]
    runs += [made(finished=False, method="fml", fml={"alpha": alpha}) for alpha in (0.3, 0.6)]
    assert "fml.alpha" in Page(page(runs)).text


def test_an_unfinished_run_without_a_round_has_its_settings():
    found = Page(page([run_by_hand([], finished=False, **SETTINGS)]))
    assert "0 of 4 rounds are there" in found.text and "momentum" in found.text
    assert not found.all("img")


def test_a_picture_that_cannot_be_drawn_costs_a_line(monkeypatch):
    def broken(*arguments, **options):
        raise ValueError("no <ink>")

    monkeypatch.setattr(plots, "mix_by_round", broken)
    found = Page(page([made()]))
    assert len(found.all("img")) == 2
    assert "The picture mix could not be drawn (ValueError: no <ink>)." in found.text


def test_the_command_writes_the_page_and_says_what_is_wrong(tmp_path, monkeypatch, capsys):
    made(tmp_path / "run", method="fd")
    monkeypatch.chdir(tmp_path)
    assert report.main(["run"]) == 0
    assert "run: FD, best mean of participants 75.00 %" in capsys.readouterr().out
    assert (tmp_path / "report.html").stat().st_size > 20_000
    wrong = {"nothing": "no such folder", "run --out rounds.jsonl": r"ends in \.html"}
    for words, said in wrong.items():
        with pytest.raises(PfedafmError, match=said):
            report.main(words.split())
