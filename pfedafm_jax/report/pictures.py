"""The pictures of a report, as images inside the page: drawings where they stay small, pixels where they would not."""

import base64
import io
import warnings
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import matplotlib
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pfedafm_jax import plots
from pfedafm_jax.config import Config
from pfedafm_jax.data import Dataset, load_dataset
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.report.html import Html, element, together
from pfedafm_jax.report.read import Run

MANY = 400  # bars or points of a drawing beyond which pixels are smaller
WINDOW = 5


def picture(
    figure: Figure, caption: str, alt: str, *, height: float = 3.6, width: float = 5.6, many: bool = False
) -> Html:
    """A figure of the page. It is drawn small, so that its letters can be read on a phone."""
    figure.set_size_inches(width, height)
    _fit_legend(figure, width)
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "path"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a run's name may be in any script
        if many:
            figure.savefig(file, format="png", dpi=200, transparent=True)
        else:
            figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return shown(file.getvalue(), "png" if many else "svg+xml", caption, alt)


def shown(content: bytes, kind: str, caption: str, alt: str) -> Html:
    """An image with its caption."""
    source = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    parts = element("img", src=source, alt=alt), element("figcaption", caption)
    return element("figure", *parts)


def _fit_legend(figure: Figure, width: float) -> None:
    """The legend below a figure, in as many columns as this width has room for."""
    for legend in list(figure.legends):
        legend.remove()
        handles, labels = figure.axes[0].get_legend_handles_labels()
        columns = max(1, min(len(labels), int(13 * width / (max(map(len, labels)) + 7))))
        figure.legend(handles, labels, frameon=False, fontsize=8, ncols=columns, loc="outside lower center")


def _whole_numbers(axis: Axis) -> None:
    """Rounds and clients are counted."""
    axis.set_major_locator(MaxNLocator(integer=True))


def curves(runs: Sequence[tuple[str, Run]]) -> Html:
    """Accuracy of all runs by round: of a round's participants, and of all clients where they were evaluated."""
    longest = max(len(run.records) for _, run in runs)
    window = WINDOW if longest >= 5 * WINDOW else 1
    smoothed = f", mean of {window} rounds" if window > 1 else ""
    records = {label.replace("$", r"\$"): [run.records] for label, run in runs}  # no formula in a name
    found = []
    for y, width, caption in (
        (
            "participants",
            window,
            f"Mean accuracy of the round's participants, each right after its training{smoothed}.",
        ),
        ("all_clients", 1, "Mean accuracy of all clients, where they were evaluated."),
    ):
        key = plots.Y_AXES[y][0]
        if max(sum(record[key] is not None for record in run.records) for _, run in runs) < 2:
            continue  # nothing that the table does not say
        figure = plots.curves(records, y=y, window=width)
        figure.axes[0].set_xlim(1 - 0.03 * longest, 1.03 * longest)
        _whole_numbers(figure.axes[0].xaxis)
        found.append(
            picture(figure, caption, f"{y.replace('_', ' ')}: accuracy by round of all runs", width=6.2, height=4.2)
        )
    return element("div", together(found), class_="figures")


def of_run(run: Run, data_dir: str | None) -> list[Html]:
    """The pictures of one run, as far as its files go."""
    found: list[Html] = []
    if not run.records:
        return found + _split(run, data_dir)
    judged, config = run.predictions[0], run.config
    figure = plots.accuracy_by_round(run.records, judged_by=judged)
    _whole_numbers(figure.axes[0].xaxis)
    caption = "Accuracy by round: the round's participants right after their training, and all clients where evaluated."
    found.append(picture(figure, caption, "accuracy by round", height=4.0))
    scores = run.evaluations(judged)
    if len(scores):
        groups, last = run.clients["architecture"], int(run.clients["evaluation_rounds"][-1])
        figure = plots.accuracy_by_client(scores[-1], groups, config.architectures)
        caption = f"Every client's accuracy after round {last}, sorted within its architecture."
        found.append(picture(figure, caption, "accuracy of each client", height=4.0, many=config.num_clients > MANY))
    if "visits/mix_mean" in run.clients:
        figure = plots.mix_by_round(run.clients["visits/mix_mean"])
        _whole_numbers(figure.axes[0].xaxis)
        caption = "The mix vectors by round: 1 takes the local extractor's features alone, 0 the shared one's."
        found.append(picture(figure, caption, "mean of the mix vector by round", height=4.0))
    return found + _split(run, data_dir)


def _split(run: Run, data_dir: str | None) -> list[Html]:
    """Who has which classes: drawn from the data where it is at hand, else the picture that the run itself left."""
    caption = "Who has which classes: images of each class (columns) at each client (rows), training and test together."
    dataset = None if run.partition is None else _dataset(run.config, data_dir)
    same = dataset is not None and dataset.digest == (run.about.get("data") or {}).get("digest")
    if run.partition is not None and dataset is not None and same:
        counts = run.partition.class_counts(dataset.labels, dataset.num_classes)
        figure = plots.classes_by_client(counts)
        _whole_numbers(figure.axes[0].yaxis)
        return [picture(figure, caption, "images of each class at each client", height=4.0)]
    left: Path = run.folder / "split.png"
    if left.is_file():
        return [shown(left.read_bytes(), "png", caption, "images of each class at each client")]
    return []


def _dataset(config: Config, data_dir: str | None) -> Dataset | None:
    sizes = config.synthetic_classes, config.synthetic_samples, config.seed, config.image_size
    return _load(
        config.dataset, data_dir, *(sizes if config.dataset == "synthetic" else (10, 60, 0, config.image_size))
    )


@lru_cache(maxsize=1)  # runs side by side mostly share their data
def _load(name: str, data_dir: str | None, classes: int, samples: int, seed: int, size: int) -> Dataset | None:
    """A dataset if it is on this machine: a report downloads nothing."""
    try:
        return load_dataset(
            name,
            data_dir,
            num_classes=classes,
            num_samples=samples,
            seed=seed,
            image_size=size,
            offline=True,
            log=lambda line: None,
        )
    except PfedafmError:
        return None
