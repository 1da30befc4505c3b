"""Settings: what is refused, with what words; methods' own; presets; files."""

import dataclasses
import json
import math
import pickle
import tomllib
from typing import Literal

import numpy as np
import pytest

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli import options
from pfedafm_jax.cli.flags import every_setting
from pfedafm_jax.config.config import GROUPS, METHOD_SETTINGS, Config, config_names, updated
from pfedafm_jax.config.method_settings import (
    MethodSettings,
    Rate,
    Setting,
    changed,
    check_settings,
    settings_of,
)
from pfedafm_jax.config.presets import presets, with_preset
from pfedafm_jax.data import load_dataset
from pfedafm_jax.methods import method_names
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.methods.fml import FML
from pfedafm_jax.methods.pfedafm import PFedAFM
from pfedafm_jax.runs.existing import differences

EVERY = list(every_setting().items())


def wrong_values(setting: Setting) -> list:
    """Just outside of every limit, and of other types."""
    step = 1 if setting.kind is int else 1e-6
    wrong: list = [b"x", [1], {"a": 1}] + ([] if setting.optional else [None])
    types = {bool: [1, "yes"], str: [3], int: [2.5, True, "1"], tuple: ["cnn1"]}
    wrong += {**types, float: [True, "1", math.nan, math.inf]}[setting.kind]
    for word, _, end in setting.limits:
        most = end * (1 + 1e-6) + step if setting.kind is float else end + step
        beyond = {" from ": [end - step], " to ": [most, 10**400]}
        wrong += beyond.get(word, [end])  # above, below
    return wrong + (["nonsense"] if setting.choices else [])


@pytest.mark.parametrize(("name", "setting"), EVERY, ids=[name for name, _ in EVERY])
def test_every_setting_refuses_what_is_out_of_its_range_and_names_itself(name, setting):
    for value in wrong_values(setting):
        with pytest.raises(PfedafmError) as caught:
            check_names(updated(Config(), {name: value}))
        given = tuple(value) if isinstance(value, list) else value
        said = str(caught.value)
        assert said.startswith(f"{name} = {given!r} cannot be used; accepted: "), (value, said)
    assert check_names(updated(Config(), {name: setting.default}))
    assert setting.help, "the text below the field is its help"
    # A number without both ends can hold what no 32-bit float can.
    assert len(setting.limits) == (2 if setting.kind in (int, float) else 0)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("image_size", 32, "0 for cifar10, where all have one size"),
        (
            "partition",
            "pathologic",
            "pathological, dirichlet, iid, natural (did you mean pathological?), or a file",
        ),
        ("classes_per_client", 11, "1 to 10, the classes of cifar10"),
        ("validation_fraction", 1.0, "a number from 0, below 1"),
        ("num_clients", 0, "a whole number from 1 to 10,000,000"),
        ("participation", 1.5, "a number above 0 to 1"),
        ("participation", 0.001, "at least 0.01: one of 100 clients per round"),
        ("architectures", (), "at least one, such as cnn1"),
        ("shared_extractor", "cnn", "cnn1, cnn2"),
        ("learning_rate", -1.0, "a number from 0 to 1e+06"),
        ("flip", 1, "true or false"),
        ("method", "pfedfm", "did you mean pfedafm"),
        ("pfedafm.mix_fixed", 1.5, "a number from 0 to 1 or none"),
        ("lg_fedavg.shared_layers", ("conv1", "conv1"), "each once"),
        ("pfedafm", 3, "settings of pfedafm: learning_rate, mix_learning_rate"),
    ],
)
def test_an_error_says_what_is_accepted(name, value, accepted):
    with pytest.raises(PfedafmError) as caught:
        check_names(updated(Config(), {name: value}))
    assert str(caught.value).startswith(f"{name} = {value!r} cannot be used")
    assert accepted in str(caught.value)


def test_whole_numbers_none_and_the_ends_of_ranges_pass():
    good = {"participation": 1, "gamma": 1, "learning_rate": 0.0}
    for name, value in (*good.items(), ("pfedafm.mix_fixed", 1), ("pfedafm.mix_fixed", None)):
        config = updated(Config(), {name: value})
        assert check_names(config) is config


def test_unknown_names_are_refused_with_the_nearest_one():
    for asked, said in (("cifar_100", "did you mean cifar100.*npz:PATH"), ("npz:", "npz:PATH")):
        with pytest.raises(PfedafmError, match=rf"dataset = '{asked}' .*{said}"):
            load_dataset(asked)
    with pytest.raises(PfedafmError, match=r"pfedafm.mix_fix; .*did you mean mix_fixed"):
        updated(Config(), {"pfedafm": {"mix_fix": 1}})
    with pytest.raises(PfedafmError, match=r"unknown setting round; .*did you mean rounds"):
        updated(Config(), {"round": 3})
    with pytest.raises(AttributeError, match="did you mean rounds"):
        _ = Config().round
    assert {name for kind in GROUPS for name in settings_of(kind)} == set(settings_of(Config))


def test_too_few_synthetic_images_are_refused():
    config = Config(dataset="synthetic", synthetic_classes=20, synthetic_samples=119)
    with pytest.raises(PfedafmError, match=r"synthetic_samples = 119 .*at least 120"):
        config.check()


def test_updates_leave_the_rest_and_lists_become_tuples():
    config = updated(
        Config(), {"rounds": 7, "architectures": ["cnn1"], "pfedafm": {"mix_scalar": True}}
    )
    own = (PFedAFM.Settings(mix_scalar=True),)
    assert config == Config(rounds=7, architectures=("cnn1",), settings=own)
    assert updated(config, {"fml": {"alpha": 0.3}}).pfedafm.mix_scalar


def test_a_methods_settings_are_read_by_name_and_by_class():
    config = Config(settings=(FML.Settings(alpha=0.3), FML.Settings(alpha=0.4)))
    assert config.fml.alpha == config.of(FML.Settings).alpha == 0.4  # the last word counts
    assert config.pfedafm == PFedAFM.Settings()
    assert Config(settings=(FML.Settings(),)) == Config() and hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().rounds = 3  # type: ignore[misc]
    for wrong in (3, ("fml",), {"fml": 1}):
        with pytest.raises(PfedafmError, match=r"settings = .* a tuple of methods' settings"):
            Config(settings=wrong)  # type: ignore[arg-type]


def test_a_method_may_have_a_learning_rate_of_its_own():
    config = updated(Config(learning_rate=0.02), {"fml": {"learning_rate": 0.005}})
    rates = [dataclasses.replace(config, method=name).rate for name in ("fml", "fd")]
    assert rates == [0.005, 0.02]
    # One that is set later is that of every method, but for those that are set with it.
    config = dataclasses.replace(config, method="fml")
    faster = updated(config, {"learning_rate": 0.1})
    for later in (faster, with_preset(config, "authors_code"), with_preset(config, "paper")):
        assert later.rate == later.learning_rate
    assert updated(config, {"rounds": 3}).rate == 0.005
    assert updated(config, {"learning_rate": 0.1, "fml": {"learning_rate": 0.3}}).rate == 0.3


def test_a_record_of_a_run_has_its_own_methods_settings_only():
    config = updated(Config(method="fml"), {"fml": {"alpha": 0.3}, "fd": {"gamma": 9.0}})
    stored = json.loads(json.dumps(config.as_dict()))
    assert stored["fml"]["alpha"] == 0.3 and stored["fml"]["beta"] == 0.5 and "fd" not in stored
    assert updated(Config(), stored) == dataclasses.replace(
        config, settings=(FML.Settings(alpha=0.3),)
    )


def test_a_run_that_names_a_setting_of_an_earlier_version_is_read_and_goes_on():
    stored = {**Config().as_dict(), "backend": "shard_map"}
    assert updated(Config(), stored) == Config()
    assert differences(stored, Config()) == []


def test_a_class_says_what_its_settings_are():
    @dataclasses.dataclass(frozen=True)
    class Own(MethodSettings):
        strength: Rate = 0.5
        """How much."""
        steps: int | None = None
        kind: Literal["hard", "soft"] = "hard"

        def __post_init__(self):
            if self.steps == 0:
                raise ValueError("steps but 0")

    found = settings_of(Own)
    assert list(found) == ["learning_rate", "strength", "steps", "kind"]
    assert found["strength"].help == "How much."
    assert found["steps"].accepted == "a whole number or none"
    assert found["kind"].accepted == "hard, soft"
    assert changed(Own(), {"strength": 2, "kind": "soft"}) == Own(2, kind="soft")
    assert [found["steps"].read(word) for word in ("3", "none")] == [3, None]
    with pytest.raises(PfedafmError, match=r"steps = '1.5' .*accepted: a whole number or none"):
        found["steps"].read("1.5")
    with pytest.raises(PfedafmError, match=r"own.strength = -1 .*accepted: a number from 0"):
        check_settings(Own(-1), "own.")
    with pytest.raises(PfedafmError, match=r"own = .* accepted: steps but 0"):
        changed(Own(), {"steps": 0}, "own.")


def test_a_bare_config_is_hetero_cifar10_with_one_learning_rate_for_all_methods():
    named = Config.load("hetero_cifar10")
    assert dataclasses.replace(named, settings=()) == Config()
    rates = {one.method: one.learning_rate for one in named.settings}
    low = dict.fromkeys(("fml", "fedkd", "fedapen"), 0.005) | {"fedproto": None}
    assert rates == low | dict.fromkeys(("fedper", "fd", "standalone", "lg_fedavg"), 0.01)
    knobs = {"fml.alpha": 0.75, "fedkd.t_start": 0.98, "fedproto.lambda_mse": 10}
    knobs |= {f"{method}.learning_rate": rate for method, rate in rates.items()}
    assert named == updated(Config(), knobs)
    usual = {"fml.alpha": 0.5, "fedkd.t_start": 0.95, "fedproto.lambda_mse": 1}
    assert updated(named, {"learning_rate": 0.02, **usual}) == Config()
    assert all(Config.load(name).settings == named.settings for name in config_names())


def test_lists_and_numbers_of_numpy_are_taken():
    config = Config(seed=np.int64(3), learning_rate=np.float32(0.5), architectures=["cnn1"]).check()  # type: ignore[arg-type]
    assert config == Config(seed=3, learning_rate=0.5, architectures=("cnn1",))
    assert type(config.seed) is int and type(config.learning_rate) is float


def test_every_named_configuration_and_preset_is_good():
    assert config_names() == ["hetero_cifar10", "hetero_cifar100", "homo_cifar10", "homo_cifar100"]
    for name in config_names():
        config = check_names(Config.load(name))
        assert config.dataset in name and len(config.architectures) == (1 if "homo_" in name else 5)
    with pytest.raises(PfedafmError, match=r"did you mean hetero_cifar10.*or a TOML file"):
        Config.load("hetero_cifar")
    for preset in presets():
        assert check_names(with_preset(Config(), preset)).method in method_names()
    with pytest.raises(PfedafmError, match=r"preset = 'author' .*authors_code"):
        with_preset(Config(), "author")


def test_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('dataset = "cifar100"\nclasses_per_client = 10\n[pfedafm]\nmix_fixed = 0.5\n')
    config = check_names(Config.load(path))
    assert (config.dataset, config.classes_per_client) == ("cifar100", 10)
    assert (config.pfedafm.mix_fixed, config.rounds) == (0.5, Config().rounds)
    config = dataclasses.replace(config, dataset='folder:/data/😀 "é"')
    path.write_text(config.toml("what it is\n\nfor"))
    assert Config.load(path) == config and path.read_text().startswith("# what it is\n#\n# for\n")
    assert updated(Config(), tomllib.loads("participation = 1")).check().num_participants == 100


@pytest.mark.parametrize(
    "content", [b"rounds = ", b"rounds 3", b"\xff\xfe", b"x = " + b"[" * 5000, None]
)
def test_a_broken_or_missing_file_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PfedafmError, match=f"{path.name}"):
        Config.load(path)


def test_the_released_code_as_a_preset():
    config = check_names(with_preset(Config(), "authors_code"))
    own = config.pfedafm_released
    found = config.method, config.protocol, config.normalisation
    assert found == ("pfedafm_released", "authors", "imagenet")
    assert (config.batch_size, config.local_epochs, config.rounds) == (512, 10, 500)
    assert config.flip and config.erase and config.crop
    assert own.mix_relay and own.leak_momentum and own.last_alone and own.send_header
    assert (own.mix_learning_rate, own.mix_weight_decay) == (0.01, 1e-3)
    assert config.shared_extractor == "cnn5"
    one = with_preset(Config(architectures=("cnn1",), dataset="cifar100"), "authors_code")
    found = one.shared_extractor, one.pfedafm_released.mix_learning_rate, one.normalisation
    assert found == ("cnn1", 0.1, "dataset")
    words = "--preset authors_code --dataset cifar100 --architectures cnn1 --flip false"
    flags, _ = options.parse(words.split(), "run", "")
    found = flags.shared_extractor, flags.pfedafm_released.mix_learning_rate, flags.normalisation
    assert found == ("cnn1", 0.1, "dataset") and flags.crop and not flags.flip


def test_the_preset_of_the_papers_length_takes_another_of_its_columns_from_flags():
    found, _ = options.parse(["--preset", "paper"], "run", "")
    assert (found.rounds, found.local_epochs, found.learning_rate) == (500, 10, 0.01)
    assert (found.num_clients, found.num_participants) == (100, 10)
    words = "--preset paper --num-clients 50 --participation 0.2"
    found, _ = options.parse(words.split(), "run", "")
    assert (found.rounds, found.num_clients, found.num_participants) == (500, 50, 10)


def test_settings_of_every_method_can_be_pickled():
    for kind in METHOD_SETTINGS.values():
        config = Config(settings=(kind(learning_rate=0.125),))
        assert pickle.loads(pickle.dumps(config)) == config
