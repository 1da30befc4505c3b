"""One's own model, data and method: the two example extractors, every kind of data, plugins, and
`docs/extending.md`."""

import dataclasses
import re
import runpy
import shlex
import sys
from pathlib import Path
from types import ModuleType

import jax
import numpy as np
import pytest

from pfedafm_jax import methods
from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli import main
from pfedafm_jax.cli.commands.compare import CompareOptions
from pfedafm_jax.cli.options import RunOptions
from pfedafm_jax.cli.options import parse as parse_words
from pfedafm_jax.cli.plugins import load_plugin
from pfedafm_jax.config import method_settings
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.data import Partition, dataset_from_arrays
from pfedafm_jax.data.load import split
from pfedafm_jax.data.sources.synthetic import make_synthetic
from pfedafm_jax.methods import method_names, register_method
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.methods.fedper import FedPer
from pfedafm_jax.models import architecture
from pfedafm_jax.models.architecture import describe, register_extractor
from pfedafm_jax.models.mobilenet import MobileNetSmall
from pfedafm_jax.models.resnet import ResNet
from pfedafm_jax.runs.existing import differences
from pfedafm_jax.runs.experiment import Experiment

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module", autouse=True)
def registries():
    """What is registered here is gone afterwards."""
    kept = (
        dict(architecture._EXTRACTORS),
        dict(methods._METHODS),
        list(sys.path),
        dict(method_settings._registered),
    )
    yield
    architecture._EXTRACTORS.clear()
    architecture._EXTRACTORS.update(kept[0])
    methods._METHODS.clear()
    methods._METHODS.update(kept[1])
    sys.path[:] = kept[2]
    method_settings._registered.clear()
    method_settings._registered.update(kept[3])
    describe.cache_clear()


def taps(size: int, stride: int = 1) -> int:
    """Pixels under a 3-wide window over all its places, zero padding left out."""
    places = -(-size // stride)
    first = -(max((places - 1) * stride + 3 - size, 0) // 2)
    starts = range(first, first + places * stride, stride)
    return sum(0 <= start + offset < size for start in starts for offset in range(3))


def test_xla_counts_the_multiplications_of_a_resnet_as_one_does_by_hand():
    by_hand = (
        taps(8) ** 2 * 3 * 16  # the first convolution
        + 2 * taps(8) ** 2 * 16 * 16
        + (taps(8, 2) ** 2 * 16 * 32 + taps(4) ** 2 * 32 * 32 + 4**2 * 16 * 32)
        + (taps(4, 2) ** 2 * 32 * 64 + taps(2) ** 2 * 64 * 64 + 2**2 * 32 * 64)
        + 64 * 500  # the layer added to the width
    )
    assert by_hand == 600_512
    found = describe("resnet_small", 10, (8, 8, 3))
    assert by_hand < found.extractor_macs < 1.05 * by_hand  # and the normalisation
    weights = 27 * 16 + 2 * 9 * 16 * 16
    weights += 9 * 16 * 32 + 9 * 32 * 32 + 16 * 32
    weights += 9 * 32 * 64 + 9 * 64 * 64 + 32 * 64
    norms = 2 * (3 * 16 + 3 * 32 + 3 * 64)
    assert found.extractor_params == weights + norms + 64 * 500 + 500


def test_xla_counts_a_depthwise_convolution_as_one_channel_each():
    by_hand = (
        taps(8) ** 2 * 3 * 16
        + (taps(8) ** 2 * 16 + 8**2 * 16 * 16)
        + (taps(8, 2) ** 2 * 16 + 4**2 * 16 * 32)
        + (taps(4, 2) ** 2 * 32 + 2**2 * 32 * 64)
        + 64 * 500
    )
    found = describe("mobilenet_small", 10, (8, 8, 3)).extractor_macs
    assert by_hand < found < 1.2 * by_hand  # were the groups ignored: more than twice as much


@pytest.mark.slow
def test_the_example_extractors_learn_on_the_engine(dataset, config):
    names = ("short_resnet", "short_mobilenet")  # a block less compiles in two thirds of the time
    for name, kind in zip(names, (ResNet, MobileNetSmall), strict=True):
        register_extractor(name, kind(widths=(8, 16)))
    settings = {"architectures": names, "num_clients": 4, "batch_size": 20}
    config = updated(config, method="standalone", **settings)
    # No partial batch: half as much to compile.
    rows = np.arange(200, dtype=np.int32).reshape(4, 50)
    partition = Partition(tuple(rows[:, :40]), tuple(rows[:, 40:]), tuple(rows[:, :0]))
    experiment = Experiment(config, dataset, partition)
    records = list(experiment.rounds(2))
    assert all(record.not_finite == 0 for record in records)
    visits = experiment.result().clients["visits/loss"]
    assert np.nanmean(visits[-1]) < np.nanmean(visits[0])
    # One of each kind at least.
    assert np.isfinite(visits[:, 0::2]).any() and np.isfinite(visits[:, 1::2]).any()


def test_the_papers_networks_take_images_like_those_of_mnist():
    for name, channels in [("cnn1", 32), ("cnn2", 16), ("cnn3", 32), ("cnn4", 32), ("cnn5", 32)]:
        found = describe(name, 10, (28, 28, 1))
        params = jax.eval_shape(found.init_extractor, jax.random.key(0))
        assert params["conv1"]["kernel"].shape == (5, 5, 1, 16)
        assert params["fc1"]["kernel"].shape[0] == 4 * 4 * channels  # 28 → 24 → 12 → 8 → 4


def test_settings_are_held_against_the_data_at_hand(dataset, config):
    own = updated(config, dataset="mine", classes_per_client=5)
    assert check_names(updated(own, classes_per_client=4), dataset)
    with pytest.raises(PfedafmError, match=r"classes_per_client = 5 .* the classes of mine"):
        split(own, dataset)
    with pytest.raises(PfedafmError, match="dataset = 'mine' cannot be used; accepted: cifar10"):
        Experiment(own)
    arrays = make_synthetic(3, 72, seed=1, image_size=28)
    images, labels = arrays.train_images[..., 0], arrays.train_labels
    none = images[:0], labels[:0]
    grey = dataset_from_arrays("grey", images, labels, *none)
    with pytest.raises(PfedafmError, match=r"normalisation = 'imagenet' .* 1 and not 3 channels"):
        split(updated(config, normalisation="imagenet"), grey)
    one = dataset_from_arrays("one", images, labels * 0, *none)
    with pytest.raises(PfedafmError, match="two or more classes"):
        Experiment(config, one)
    other = dataset_from_arrays("grey", images, labels, *none, mean=(0.5,))
    assert other.digest != grey.digest


def parse(*words: str) -> Config:
    return parse_words(list(words), "run", "", RunOptions).config


PLUGIN = """
from typing import Literal

import helper_of_the_plugin
from pydantic import model_validator

from pfedafm_jax import register_extractor, register_method
from pfedafm_jax.models.resnet import ResNet
from pfedafm_jax.methods import MethodSettings
from pfedafm_jax.methods.fedper import FedPer

register_extractor("narrow", ResNet(widths=(8, 8)))


@register_method
class Plugged(FedPer):
    name = "plugged"

    class Settings(MethodSettings):
        rate: float = 0.5
        '''How fast.'''
        steps: int | None = None
        kind: Literal["hard", "soft"] = "hard"
        twice: bool = False

        @model_validator(mode="after")
        def _not_negative(self):
            if self.rate < 0:
                raise ValueError("rate 0 or more")
            return self
"""


@pytest.fixture(scope="module")
def plugin(tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "helper_of_the_plugin.py").write_text("")
    (folder / "mine.py").write_text(PLUGIN)
    return str(folder / "mine.py")


def test_a_plugin_is_known_to_settings_errors_and_help(plugin, capsys):
    config = parse("--plugin", plugin, "--method", "plugged", "--architectures", "narrow,cnn5", "--plugged.rate", "2",
                   "--plugged.steps", "3", "--plugged.kind", "soft", "--plugged.twice", "--plugged.lr", "0.3")  # fmt: skip
    assert config.architectures == ("narrow", "cnn5") and "plugged" in method_names()
    method = methods.find_method("plugged").of(config, None, None, ())  # type: ignore[arg-type]
    assert tuple(dict(method.settings).values()) == (None, 2.0, 3, "soft", True)
    assert method.title == "plugged"
    assert config.rate == 0.3 and Config().plugged.rate == 0.5
    with pytest.raises(SystemExit) as ended:
        parse("--plugin", plugin, "--help-all")
    shown = capsys.readouterr().out
    assert ended.value.code == 0 and "plugged" in shown and "narrow" in shown
    assert "--plugged.rate 0.5" in shown and "How fast." in shown and "--plugin FILE.py" in shown
    with pytest.raises(PfedafmError, match="did you mean plugged"):
        parse("--method", "pluged")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plugged.rat", "1"], "did you mean --plugged.rate"),
        (["--pluged.rate", "1"], "did you mean --plugged.rate"),
        (["--plugged.rate", "fast"], "plugged.rate = 'fast' cannot be used; accepted: a number"),
        (["--plugged.rate", "-1"], "accepted: rate 0 or more"),
        (["--plugged.rate", "nan"], "plugged.rate = 'nan' cannot be used; accepted: a number"),
        (["--plugged.steps", "1.5"], "accepted: a whole number, or none"),
        (["--plugged.kind", "mild"], "plugged.kind = 'mild' cannot be used; accepted: hard, soft"),
    ],
)
def test_own_settings_that_cannot_be_used_are_named(plugin, words, said):
    with pytest.raises(PfedafmError, match=said):
        parse("--plugin", plugin, *words)


def test_own_settings_are_recorded_compared_and_hashable(plugin):
    load_plugin(plugin)
    config = updated(Config(method="plugged"), {"plugged": {"rate": 2}})
    assert hash(config) != hash(Config(method="plugged"))
    assert config.as_dict()["plugged"]["rate"] == 2
    assert differences(config.as_dict(), config) == []
    assert differences(Config(method="plugged").as_dict(), config) == ["plugged.rate: 0.5 → 2.0"]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "a Python file that is there"),
        ("x = 1\ny = x / 0\n", "line 2: ZeroDivisionError"),
        ("def f(:\n", "line 1: SyntaxError"),
        ("import sys\nsys.exit(3)\n", "line 2: SystemExit"),
        ("import pfedafm_jax\npfedafm_jax.register_extractor('x', int)\n", "a Flax module"),
    ],
)
def test_a_plugin_that_fails_is_named_with_its_line(content, said, tmp_path):
    path = tmp_path / "broken.py"
    if content:
        path.write_text(content)
    with pytest.raises(PfedafmError, match=rf"(?s)broken\.py.*{said}"):
        parse("--plugin", str(path))


def test_code_of_a_plugin_that_leaves_is_named(capsys):
    for code in (0, 3):
        with pytest.raises(SystemExit, match="2"):
            main.guarded(lambda words, code=code: sys.exit(code))
        said = capsys.readouterr().err
        assert "test_extending.py, line" in said and f"calls sys.exit({code})" in said


def test_methods_that_cannot_be_registered_say_why():
    @dataclasses.dataclass
    class Loose:
        rate: float = 0.5

    class Odd(methods.MethodSettings):
        rates: list[float] = []

    @dataclasses.dataclass(frozen=True)
    class Unchecked(methods.MethodSettings):
        rate: float = 0.5

    def kind(name, *bases, **more):
        return type(name, bases, {"name": name, "__module__": __name__, **more})

    for made, said in [
        (kind("half", methods.Method), "lacks init_client, client_update, predict, cost"),
        (kind("pfedafm", FedPer), "not the name of a built-in method"),
        (kind("loose", FedPer, Settings=Loose), "a class derived from MethodSettings"),
        (kind("unchecked", FedPer, Settings=Unchecked), "without @dataclass"),
        (kind("odd", FedPer, Settings=Odd), r"a class derived .*rates: list"),
        (kind("rounds", FedPer), "or of a setting"),
        (int, "a class derived from"),
    ]:
        with pytest.raises(PfedafmError, match=said):
            register_method(made)  # type: ignore[arg-type]


def test_a_run_on_own_data_has_the_name_of_the_data(tmp_path):
    for words, name in [
        (["--dataset", "npz:some/digits.npz"], "digits"),
        (["--dataset", "folder:/data/pets/", "--method", "fd"], "pets-fd"),
        (["--dataset", "tfds:mnist", "--image-size", "28"], "mnist"),
    ]:
        assert parse_words(words, "run", "", RunOptions).run_dir == Path("runs") / name


def command(words: list[str]) -> int:
    """A command of the guide, in this process."""
    before, sys.argv = sys.argv, [str(ROOT / words[1]), *words[2:]]
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as ended:
        return int(ended.code or 0)
    finally:
        sys.argv = before
    return 0


# Blocks that take longest to compile; tests/models/test_networks.py and test_values.py have their like.
LONG_BLOCKS = ("normed = updated(", "wards = ", "from pfedafm_jax import token_ids")


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_the_guide_runs_as_it_stands(whole, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    guide = ModuleType("guide")
    monkeypatch.setitem(sys.modules, "guide", guide)  # dataclasses look their module up
    blocks = re.findall(r"```python\n(.*?)```", DOCS, re.DOTALL)
    assert sum(block.startswith(LONG_BLOCKS) for block in blocks) == len(LONG_BLOCKS)
    for block in blocks:
        if block.startswith("# my_"):
            (tmp_path / block.splitlines()[0][2:]).write_text(block)
        if whole or not block.startswith(LONG_BLOCKS):
            exec(compile(block, "docs/extending.md", "exec"), vars(guide))
    assert guide.experiment.records[-1].round == 2
    assert guide.experiment.federation.method.settings.strength == 0.01
    table = np.asarray(guide.kindred.state.server["headers"]["bias"])
    seen = sorted({k for record in guide.kindred.records for k in record.participants})
    assert len({row.tobytes() for row in table}) == len(seen) + (len(seen) < len(table))
    text = "\n".join(re.findall(r"```bash\n(.*?)```", DOCS, re.DOTALL)).replace("\\\n", "")
    commands = [shlex.split(line) for line in text.splitlines() if line.startswith("python")]
    assert len(commands) == 4
    for words in commands:  # every one is understood
        parse_words(words[2:], words[1], "", CompareOptions)
    own_data = next(words for words in commands if "npz:shades.npz" in words)
    assert command(own_data) == 0
    out = capsys.readouterr().out
    assert "300 images" in out and "best mean of participants" in out
    # Two images of a class in each other's place: another dataset, which it does not go on with.
    with np.load("shades.npz") as arrays:
        images, labels = arrays["images"].copy(), arrays["labels"]
    images[[0, 3]] = images[[3, 0]]
    np.savez("shades.npz", images=images, labels=labels)
    assert command([*own_data, "--rounds", "3"]) == 2
    assert re.search(r"data: sha256 \w{16}… → \w{16}…", capsys.readouterr().err)
