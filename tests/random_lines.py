"""Random command lines and configurations, with names that are hard to print, draw or write."""

import random
from pathlib import Path

from tiny_command import SETTINGS

from pfedafm_jax.config.config import Config
from pfedafm_jax.config.method_settings import every_method

EVERY_SETTING = [
    *Config.model_fields,
    *(f"{method}.{name}" for method, kind in every_method().items() for name in kind.model_fields),
]
PIECES = [*"$[]{}%\\<>&\n' \"#=-.~", "$x$", "[/bold]", "[red]", "é", "日本", "\u202e", "\x1b[31m", "\udcff",
          "a", "run", "x" * 255, "x" * 256, "..", "%s", "{0}", "&amp;", "<b>", "\\n", "*", "?"]  # fmt: skip
VALUES = ["0", "1", "-1", "2", "3.5", "1e-3", "nan", "inf", "9" * 400, "none", "true", "", "all", "0,1",
          "synthetic", "cifar10", "cnn1", "tiny", "fml", "npz:", "npz:/dev/zero", "folder:.", "tfds:x"]  # fmt: skip


def nasty(draw: random.Random) -> str:
    return "".join(draw.choices(PIECES, k=draw.randrange(1, 5)))


def random_line(draw: random.Random, trained: Path) -> tuple[list[str], bool]:
    """Words of a command, and whether it is to be carried out: with the tiny network it is."""
    command = draw.choice(
        ["run", "compare", "sweep", "plot", "report", "predict", "export", "join"]
    )
    where = draw.choice([str(trained), str(trained), nasty(draw), str(trained.parent)])
    flags = [f"--{name.replace('_', '-')}" for name in EVERY_SETTING]
    if command in ("run", "compare", "sweep"):
        real = draw.random() < 0.03
        words = [*SETTINGS, "--rounds", "1"] if real else []
        words += ["--methods", "standalone"] if real and command == "compare" else []
        words += ["--grid", "batch_size=8,16"] if real and command == "sweep" else []
        if real or draw.random() < 0.7:
            words += ["--run-dir", nasty(draw)]
        for _ in range(0 if real else draw.randrange(4)):
            special = ["--config", "--preset", "--fresh", "--tensorboard", "--methods", "--seeds",
                       "--grid", "--drop-checkpoints", "--plugin", "--data-dir", "--coordinator", "--process-id", "--help"]  # fmt: skip
            words.append(draw.choice(flags if draw.random() < 0.6 else special))
            value = draw.choice([draw.choice(VALUES), nasty(draw), "own.toml"])
            words += [value] * (draw.random() < 0.9)
        return [command, *words], real
    words = [where, "--out", nasty(draw) + draw.choice(["", ".png", ".html", ".npz", ".csv"])]
    own = {"plot": ["--x", "--y", "--smooth", "--group", "--title"], "report": ["--title"]}
    own["predict"] = own["export"] = ["--client", "--images", "--plugin", "--onnx"]
    own["join"] = ["--data", "--architecture", "--visits", "--seed"]
    needed = {"predict": ["--images", str(trained.parent / "images.npy"), "--client", "1"],
              "export": ["--client", "2"], "join": ["--data", str(trained.parent / "mine.npz"), "--visits", "1"]}  # fmt: skip
    words += needed.get(command, []) if draw.random() < 0.5 else []
    for _ in range(draw.randrange(3)):
        words += [draw.choice(own[command]), draw.choice([draw.choice(VALUES), nasty(draw)])]
    return [command, *words], True


def random_toml(draw: random.Random) -> bytes:
    names = [*Config.model_fields, *every_method(), "unknown", "pfedafm.mix_fixed", ""]
    values = [
        "1",
        "-5",
        "0.5",
        "true",
        '"x"',
        '["cnn1"]',
        "[1, 2]",
        "{}",
        "nan",
        "1e400",
        "9" * 5000,
        "\udc80",
    ]
    lines = [f"{draw.choice(names)} = {draw.choice(values)}" for _ in range(draw.randrange(4))]
    deep = "x = " + "[" * 5000 if draw.random() < 0.02 else ""
    return "\n".join([*lines, deep]).encode("utf-8", "surrogateescape")
