"""The words of a command line: what they set, what is refused and how, and the help."""

import ast
import errno
import io
import os
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import jax
import pytest

import pfedafm_jax
from pfedafm_jax.base.checked import texts_of
from pfedafm_jax.base.errors import Interrupted, PfedafmError
from pfedafm_jax.cli import main as command_line
from pfedafm_jax.cli.commands.compare import CompareOptions
from pfedafm_jax.cli.commands.export import ExportOptions
from pfedafm_jax.cli.commands.plot import PlotOptions
from pfedafm_jax.cli.options import IN_SHORT_HELP, Invocation, RunOptions, parse, read_options
from pfedafm_jax.cli.page import LABEL, WIDTH, first_sentence
from pfedafm_jax.config.config import BUILT_IN_METHODS, BUILT_IN_NETWORKS, Config
from pfedafm_jax.config.method_settings import every_method


def asked(words: str, kind: type[RunOptions] = RunOptions) -> Invocation:
    """What these words ask `pfedafm run` for."""
    return parse(words.split(), "run", "What it does.", kind)


@pytest.mark.parametrize(
    ("words", "setting", "value"),
    [
        ("--lr 0.5", "learning_rate", 0.5),
        ("--learning_rate=0.5", "learning_rate", 0.5),
        ("--epochs 2", "local_epochs", 2),
        ("--batch 8", "batch_size", 8),
        ("--clients 50", "num_clients", 50),
        ("--model cnn1 cnn5", "architectures", ("cnn1", "cnn5")),
        ("--architectures cnn1,cnn5", "architectures", ("cnn1", "cnn5")),
        ("--flip", "flip", True),
        ("--flip --no-flip", "flip", False),
        ("--flip=true --rounds 3", "flip", True),
        ("--same-start=False", "same_start", False),
        ("--no-same-start", "same_start", False),
        ("--pfedafm.lr-mix 0.1", "pfedafm.mix_learning_rate", 0.1),
        ("--pfedafm_released.mix-lr=0.1", "pfedafm_released.mix_learning_rate", 0.1),
        ("--pfedafm.mix_fixed 0.25", "pfedafm.mix_fixed", 0.25),
        ("--pfedafm.mix-fixed none", "pfedafm.mix_fixed", None),
        ("--pfedafm.no-mix-project", "pfedafm.mix_project", False),
        ("--lg-fedavg.shared-layers conv1", "lg_fedavg.shared_layers", ("conv1",)),
        ("--lg_fedavg.shared_layers=conv1,conv2", "lg_fedavg.shared_layers", ("conv1", "conv2")),
        ("--fml.lr 0.25", "fml.learning_rate", 0.25),
        ("--rounds 3 --rounds 4", "rounds", 4),  # the last word counts
        ("--weight-decay 1e-4", "weight_decay", 1e-4),
        # Layers: the configuration, a preset, flags.
        ("", "fml.learning_rate", 0.005),
        ("--rounds 3", "fml.learning_rate", 0.005),
        ("--lr 0.1", "fml.learning_rate", None),  # one that is given is that of every method
        ("--preset paper", "rounds", 500),
        ("--preset paper,authors_code", "batch_size", 512),
        ("--preset paper --rounds 7", "rounds", 7),
        ("--preset authors_code --no-flip", "flip", False),
        ("--preset authors_code", "normalisation", "imagenet"),
        ("--preset authors_code --dataset cifar100", "normalisation", "dataset"),
        ("--preset authors_code --model cnn1", "pfedafm_released.mix_learning_rate", 0.1),
        ("--preset paper --clients 20", "num_participants", 2),
    ],
)
def test_names_that_people_type_find_their_setting(words, setting, value):
    assert attrgetter(setting)(asked(words).config) == value


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--config hetero_cifar11", "did you mean hetero_cifar10"),
        ("--dataset cifar11", "dataset = 'cifar11' cannot be used"),
        ("--method pfedafn", "did you mean pfedafm"),
        ("--participation 0.001", "participation = 0.001 cannot be used; accepted: at least 0.01"),
        ("--preset author_code", "did you mean authors_code"),
        ("--rounds many", "rounds = 'many' cannot be used; accepted: a whole number"),
        ("--rounds 2.7", "rounds = '2.7' cannot be used; accepted: a whole number"),
        ("--learning-rate -1", "learning_rate = '-1' cannot be used; accepted: at least 0"),
        ("--fml.alpha 3", "fml.alpha = '3' cannot be used; accepted: at most 1"),
        ("--protocol author", "paper, authors (did you mean authors?)"),
        ("--zzz", "unknown option --zzz; --help and --help-all say what there is"),
        ("--round 3", "unknown option --round (did you mean --rounds?)"),
        ("--fml.alpa 3", "unknown option --fml.alpa (did you mean --fml.alpha?)"),
        ("--mix-fixd 3", "did you mean --pfedafm.mix-fixed?"),
        ("--rounds", "--rounds needs a value"),
        ("3", "'3' belongs to no option"),
        ("--flip true", "'true' belongs to no option; settings are given as --SETTING VALUE, sw"),
        ("--flip=maybe", "--flip = 'maybe' cannot be used; accepted: true or false"),
        ("--num-processes 2", "--coordinator"),
        ("--process-id -1 --coordinator x", "process_id = '-1' cannot be used; accepted: at leas"),
    ],
)
def test_bad_input_is_refused_with_one_message_and_nothing_written(
    words, said, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PfedafmError) as caught:
        asked(words)
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value.exit_code == 2 and not list(tmp_path.iterdir())


def test_options_beside_the_settings():
    words = "--run-dir some/where --fresh --seed 3 --plugin-dir"
    with pytest.raises(PfedafmError, match=r"--plugin-dir \(did you mean --plugin\?\)"):
        asked(words)
    found = asked("--run-dir some/where --fresh --seed 3 --fml.alpha 0.5")
    assert found.run_dir == Path("some/where") and found.options.fresh
    assert found.flags == {"seed": 3, "fml.alpha": 0.5}
    assert found.command.endswith("--run-dir some/where --fresh --seed 3 --fml.alpha 0.5")
    comparison = asked("--methods fml,fd --seeds 0,1", CompareOptions).options
    assert (comparison.methods, comparison.seeds) == (("fml", "fd"), (0, 1))
    assert CompareOptions().methods == ("paper",) and CompareOptions().seeds == ()
    with pytest.raises(PfedafmError, match=r"^seeds\[1\] = 'one' .* a whole number"):
        asked("--seeds 0,one", CompareOptions)


def test_a_command_without_settings_has_places_and_ranges():
    words = ["runs/a", "runs/b", "--smooth", "3", "--group", "seed,method"]
    options = read_options(words, "plot", "", PlotOptions)
    assert (options.runs, options.smooth) == (("runs/a", "runs/b"), 3)
    assert options.group == ("seed", "method") and options.out == "plot.png"
    for wrong, said in [
        ([], "RUN_DIR is missing"),
        (["a", "--smooth", "0"], "smooth = '0' cannot be used; accepted: at least 1"),
        (["a", "--x", "round"], r"rounds, .* \(did you mean rounds\?\)"),
        (["a", "--smoth", "2"], r"did you mean --smooth\?"),
    ]:
        with pytest.raises(PfedafmError, match=said):
            read_options(wrong, "plot", "", PlotOptions)


def test_options_of_several_models_are_read_together():
    words = ["runs/a", "--client", "3", "--out", "there", "--onnx", "--plugin", "a,b.py"]
    options = read_options(words, "export", "", ExportOptions)
    assert (options.run, options.client, options.out, options.onnx) == ("runs/a", 3, "there", True)
    assert options.plugin == ("a,b.py",)
    with pytest.raises(PfedafmError, match=r"^out is missing$"):
        read_options(words[:3], "export", "", ExportOptions)


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("", "hetero_cifar10"),
        ("--method fd", "hetero_cifar10-fd"),
        ("--dataset npz:some/digits.npz", "digits"),
        ("--dataset folder:/data/pets/ --method fd", "pets-fd"),
        ("--dataset tfds:mnist --image-size 28", "mnist"),
    ],
)
def test_a_run_is_named_after_its_configuration_data_and_method(words, name):
    assert asked(words).run_dir == Path("runs") / name


def test_a_run_is_named_after_a_configuration_file(tmp_path):
    (tmp_path / "mine.toml").write_text("rounds = 7\nnum_clients = 5\n")
    words = f"--config {tmp_path / 'mine.toml'} --participation 1"
    found = asked(words)  # the file by itself would draw half a client
    assert found.config.rounds == 7 and found.run_dir.name == found.name == "mine"


PLUGIN = """
from typing import Literal

from pydantic import model_validator

from pfedafm_jax import register_method
from pfedafm_jax.config.method_settings import MethodSettings
from pfedafm_jax.methods.fedper import FedPer


@register_method
class Plugged(FedPer):
    name = "plugged"

    class Settings(MethodSettings):
        rate: float = 0.5
        '''How fast.'''
        steps: int | None = None
        kind: Literal["hard", "soft"] = "hard"
        twice: bool = False
"""


@pytest.fixture
def plugin(tmp_path, registered):
    file = tmp_path / "mine.py"
    file.write_text(PLUGIN)
    return str(file)


def test_a_plugin_is_known_to_settings_errors_and_help(plugin, capsys):
    flags = "--plugged.rate 2 --plugged.steps 3 --plugged.kind soft --plugged.twice"
    config = asked(f"--plugin {plugin} --method plugged {flags} --plugged.lr 0.3").config
    own = config.plugged
    assert (own.rate, own.steps, own.kind, own.twice) == (2.0, 3, "soft", True)
    assert config.rate == 0.3 and Config().plugged.rate == 0.5
    with pytest.raises(PfedafmError, match=r"did you mean --plugged.kind\?"):
        asked(f"--plugin {plugin} --plugged.kin soft")
    with pytest.raises(PfedafmError, match=r"^plugged.kind = 'sof' .*did you mean soft"):
        asked(f"--plugin {plugin} --plugged.kind sof")
    with pytest.raises(SystemExit, match="0"):
        asked(f"--plugin {plugin} --help-all")
    shown = capsys.readouterr().out
    assert "--plugged.rate 0.5" in shown and "How fast." in shown
    with pytest.raises(SystemExit, match="0"):
        asked(f"--plugin {plugin} --help")
    assert "pfedafm_released, plugged" in " ".join(capsys.readouterr().out.split())


# ------------------------------------------------------------------------------------- the help


def shown(word: str, capsys) -> list[str]:
    with pytest.raises(SystemExit, match="0"):
        asked(word)
    return capsys.readouterr().out.splitlines()


def test_config_alone_lists_the_configurations(capsys):
    listed = "\n".join(shown("--config", capsys))
    for name in ("hetero_cifar10", "homo_cifar10", "hetero_cifar100", "homo_cifar100"):
        assert name in listed


def test_help_fits_two_screens_of_80_columns_and_shows_what_it_should(capsys):
    for command, kind in (("run", RunOptions), ("compare", CompareOptions)):
        with pytest.raises(SystemExit, match="0"):
            parse(["--help"], command, "One run of one method.", kind)
        short = capsys.readouterr().out.splitlines()
        assert len(short) <= 48 and max(map(len, short)) <= WIDTH
        assert {"Run:", "Data:", "Clients:", "Training:", "Machine:"} <= set(short)
        assert any(line.split()[:2] == ["--participation", "0.1"] for line in short)
    settings = [*Config.model_fields, *RunOptions.model_fields]
    assert set(IN_SHORT_HELP) <= set(settings)


def test_help_shows_the_values_of_the_configuration_and_of_presets(capsys):
    lines = shown("--config homo_cifar100 --preset paper --help", capsys)
    assert any(line.split()[:2] == ["--rounds", "500"] for line in lines)
    assert any(line.split()[:2] == ["--architectures", "cnn1"] for line in lines)


def test_the_first_sentence_of_what_help_shows_fits_its_line():
    room = WIDTH - LABEL - 2
    for name in IN_SHORT_HELP:
        model = Config if name in Config.model_fields else RunOptions
        assert len(first_sentence(texts_of(model)[name])) <= room, name


def test_help_all_has_every_setting(capsys):
    full = shown("--help-all", capsys)
    assert max(len(line) for line in full) <= WIDTH
    flags = {word for line in full for word in line.split() if word.startswith("--")}
    names = list(Config.model_fields)
    for method, kind in every_method().items():
        names += [f"{method}.{name}" for name in kind.model_fields]
    for name in names:
        assert "--" + name.replace("_", "-") in flags


HELP_CODE = """
import sys
from pfedafm_jax.cli.main import command
try:
    command(sys.argv[1:])
except Exception as error:
    print(error)
except SystemExit:
    pass
slow = {"jax", "flax", "numpy", "pandas", "matplotlib", "tensorflow_datasets"} & set(sys.modules)
assert not slow, slow
"""


@pytest.mark.parametrize(
    "words", [[], ["rnu"], *([name, "--help"] for name in command_line.COMMANDS)], ids=str
)
def test_help_and_a_mistyped_command_do_not_wait_for_jax(words):
    run = [sys.executable, "-c", HELP_CODE, *words]
    done = subprocess.run(run, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("usage: pfedafm" in done.stdout) is (words != ["rnu"])


def test_the_help_names_the_methods_and_networks_that_come_with_the_library():
    code = """
from pfedafm_jax.methods import method_names
from pfedafm_jax.models.architecture import extractor_names
print(*method_names(), "/", *extractor_names())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    methods, networks = done.stdout.split("/")
    assert tuple(methods.split()) == BUILT_IN_METHODS
    assert tuple(networks.split()) == BUILT_IN_NETWORKS


@pytest.mark.parametrize("code", ["import pfedafm_jax", "from pfedafm_jax import Config; Config()"])
def test_importing_the_package_does_not_wait_for_jax(code):
    check = (
        "import sys; sys.exit(bool({'jax', 'numpy', 'pandas', 'matplotlib'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", f"{code}\n{check}"]).returncode == 0


def test_every_public_name_is_imported_from_where_it_is():
    tree = ast.parse(Path(pfedafm_jax.__file__).read_text())
    (for_type_checkers,) = [node for node in tree.body if isinstance(node, ast.If)]
    typed = {
        alias.name: node.module
        for node in for_type_checkers.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    modules = {name: f"pfedafm_jax.{module}" for name, module in pfedafm_jax._MODULES.items()}
    assert typed == modules
    for name in pfedafm_jax.__all__:
        assert getattr(pfedafm_jax, name) is not None
    assert set(pfedafm_jax.__all__) <= set(dir(pfedafm_jax))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pfedafm_jax.nothing


# ---------------------------------------------------------------------------- how commands end


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["swep"], "command = 'swep' cannot be used; accepted: run, "),
        (["swep"], "(did you mean sweep?)"),
        (["run", "--rounds", "x"], "error: rounds = 'x' cannot be used"),
    ],
)
def test_a_refused_command_ends_with_code_2_and_no_traceback(
    words, said, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["pfedafm", *words])
    with pytest.raises(SystemExit, match="2"):
        command_line.main()
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]])
def test_the_command_alone_lists_what_it_can_do(words, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["pfedafm", *words])
    with pytest.raises(SystemExit, match="0"):
        command_line.main()
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()[2:]]
    assert listed == list(command_line.COMMANDS)


def test_a_reader_who_leaves_ends_a_command_in_silence():
    read, write = os.pipe()
    os.close(read)  # as after `| head`
    command = [sys.executable, "-m", "pfedafm_jax", "run", "--help"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, b"")


FULL = jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmuch more")
MEMORY = "error: not enough memory on this machine"


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (MemoryError("4 TB"), f"{MEMORY} (4 TB)\n", 1),
        (FULL, f"{MEMORY} (RESOURCE_EXHAUSTED: Out of memory)\n", 1),
        (KeyboardInterrupt(), "\ninterrupted\n", 130),
        (OSError(5, "Input/output error"), "error: [Errno 5] Input/output error\n", 1),
        (OSError(errno.ENAMETOOLONG, "too long"), "error: [Errno 36] too long\n", 2),
        (Interrupted("stopped after round 2", 15), "stopped after round 2\n", 143),
        (PfedafmError("a\x1b[31m"), "error: a\\x1b[31m\n", 2),
    ],
)
def test_what_ends_a_command_is_one_message_and_a_code(error, said, code, monkeypatch, capfd):
    def fails(words):
        raise error

    with pytest.raises(SystemExit, match=str(code)):
        command_line.guarded(fails)
    assert capfd.readouterr().err == said

    class Shut(io.StringIO):
        def flush(self):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stdout", Shut())
    with pytest.raises(SystemExit, match=str(code)):
        command_line.guarded(fails)
    os.write(1, b"to nobody")  # Python's own attempts at exit would fail no more
    assert capfd.readouterr() == ("", said)


def test_a_fault_of_ours_keeps_its_traceback():
    def fails(words):
        raise jax.errors.JaxRuntimeError("INTERNAL: a bug")

    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        command_line.guarded(fails)


def test_code_of_a_plugin_that_leaves_is_named(capsys):
    for code in (0, 3):
        with pytest.raises(SystemExit, match="2"):
            command_line.guarded(lambda words, code=code: sys.exit(code))
        said = capsys.readouterr().err
        assert "test_command_line.py, line" in said and f"calls sys.exit({code})" in said
