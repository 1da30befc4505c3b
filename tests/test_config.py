"""Settings: what is refused, with what words; presets; files."""

import dataclasses
import json
import tomllib

import pytest

from pfedafm_jax import cli
from pfedafm_jax.config import Config, PFedAFM, load_config, paper_scale, updated, with_preset
from pfedafm_jax.errors import PfedafmError
from pfedafm_jax.methods import check_method, find_method

BAD = [
    ("dataset", "cifar", "cifar10"),
    ("dataset", "npz:", "npz:PATH"),
    ("image_size", -1, "0 (as they are) to 4096"),
    ("image_size", 32, "0 (as they are) for cifar10"),
    ("synthetic_classes", 1, "2 to 1000"),
    ("synthetic_samples", 0, "10,000,000"),
    ("partition", "pathologic", "pathological"),
    ("classes_per_client", 0, "1 or more"),
    ("classes_per_client", 11, "1 to 10"),
    ("gamma", 0.0, "above 0"),
    ("gamma", float("nan"), "above 0"),
    ("min_samples", 1, "2 or more"),
    ("protocol", "papers", "paper, authors"),
    ("validation_fraction", 1.0, "not including, 1"),
    ("validation_fraction", -0.1, "0 up to"),
    ("normalisation", "none", "dataset, imagenet"),
    ("flip", 1, "bool"),
    ("num_clients", 0, "1 to 10,000,000"),
    ("num_clients", 2.5, "int"),
    ("num_clients", True, "int"),
    ("participation", 0.0, "above 0"),
    ("participation", 1.5, "up to 1"),
    ("participation", 0.001, "at least 0.01"),
    ("architectures", (), "at least one of cnn1"),
    ("architectures", ("cnn1", "cnn6"), "cnn1, cnn2"),
    ("architectures", "cnn1", "tuple of names"),
    ("shared_extractor", "cnn", "cnn1, cnn2"),
    ("feature_size", 0, "1 to "),
    ("initialisation", "keras", "torch, flax"),
    ("same_start", "yes", "bool"),
    ("rounds", 0, "1 to "),
    ("local_epochs", 0, "1 to "),
    ("batch_size", 0, "1 to "),
    ("batch_size", "64", "int"),
    ("learning_rate", -1.0, "0 or more"),
    ("learning_rate", float("inf"), "0 or more"),
    ("momentum", 1.0, "not including, 1"),
    ("weight_decay", -1e-3, "0 or more"),
    ("clip_norm", 0.0, "above 0"),
    ("aggregation", "mean", "samples, uniform, last"),
    ("seed", -1, "0 to 4294967295"),
    ("seed", 2**32, "0 to 4294967295"),
    ("seed", 10**400, "0 to 4294967295"),
    ("eval_every", 0, "1 to "),
    ("devices", -1, "0 (automatic)"),
    ("clients_per_step", -1, "0 (automatic)"),
    ("store", "tape", "auto, memory, disk"),
    ("checkpoint_every", -1, "0 (never)"),
    ("learning_rates", "fml=0.1", "tuple of names"),
    ("set", "fedprox.strength=1", "tuple of names"),
    ("pfedafm", {"mix_scalar": True}, "PFedAFM"),
    ("pfedafm.mix_learning_rate", -1.0, "0 or more"),
    ("pfedafm.mix_learning_rate", None, "float"),
    ("pfedafm.mix_fixed", 1.5, "from 0 to 1"),
    ("pfedafm.mix_fixed", "one", "float or none"),
    ("pfedafm.training", "both", "iterative, end_to_end"),
    ("pfedafm.mix_weight_decay", float("nan"), "0 or more"),
    ("pfedafm.mix_relay", 0, "bool"),
]


def with_setting(name: str, value) -> Config:
    if name.startswith("pfedafm."):
        return dataclasses.replace(Config(), pfedafm=dataclasses.replace(PFedAFM(), **{name.split(".")[1]: value}))
    return dataclasses.replace(Config(), **{name: value})


@pytest.mark.parametrize(("name", "value", "accepted"), BAD, ids=[f"{name}-{value}" for name, value, _ in BAD])
def test_a_bad_setting_is_named_with_its_value_and_what_is_accepted(name, value, accepted):
    with pytest.raises(PfedafmError) as caught:
        with_setting(name, value).check().check_split()
    message = str(caught.value)
    given = value[-1] if name == "architectures" and isinstance(value, tuple) and value else value
    assert message.startswith(f"{name} = {given!r}"), message
    assert accepted in message


def test_every_setting_with_a_range_or_a_choice_is_among_the_bad_ones():
    fields = {field.name for field in dataclasses.fields(Config) if field.default is not dataclasses.MISSING}
    assert fields - {"method", "erase", "crop"} == {name for name, _, _ in BAD if not name.startswith("pfedafm")}


@pytest.mark.parametrize(
    ("name", "value"),
    [("participation", 1), ("gamma", 1), ("pfedafm.mix_fixed", 1), ("pfedafm.mix_fixed", None), ("learning_rate", 0.0)],
)
def test_good_settings_pass(name, value):
    config = with_setting(name, value)
    assert config.check() is config


def test_defaults_are_good():
    assert Config().check().num_participants == 10


def test_near_misses_are_suggested():
    with pytest.raises(PfedafmError, match=r"did you mean cifar100"):
        dataclasses.replace(Config(), dataset="cifar_100").check_split()
    with pytest.raises(PfedafmError, match=r"unknown setting pfedafm.mix_fix; .*did you mean mix_fixed"):
        updated(Config(), {"pfedafm": {"mix_fix": 1}})
    with pytest.raises(PfedafmError, match=r"unknown setting round; .*did you mean rounds"):
        updated(Config(), {"round": 3})


def test_an_unknown_method_is_named():
    with pytest.raises(PfedafmError, match=r"method = 'pfedfm' cannot be used; accepted: .*did you mean pfedafm"):
        find_method("pfedfm")


def test_too_few_synthetic_images_are_refused():
    config = dataclasses.replace(Config(), dataset="synthetic", synthetic_classes=20, synthetic_samples=119)
    with pytest.raises(PfedafmError, match=r"synthetic_samples = 119 .*at least 120"):
        config.check()


def test_updates_leave_the_rest_and_lists_become_tuples():
    config = updated(Config(), {"rounds": 7, "architectures": ["cnn1"], "pfedafm": {"mix_scalar": True}})
    assert config == dataclasses.replace(
        Config(), rounds=7, architectures=("cnn1",), pfedafm=dataclasses.replace(PFedAFM(), mix_scalar=True)
    )


def test_a_method_may_have_a_learning_rate_of_its_own():
    config = Config(learning_rate=0.02, learning_rates=("fml=0.005", "fedapen=1e-3"))
    assert [config.for_method(name).learning_rate for name in ("fml", "fedapen", "fd")] == [0.005, 1e-3, 0.02]
    resolved = config.for_method("fml")
    assert resolved == resolved.for_method() and resolved.method == "fml" and resolved.learning_rates == ()
    # One that is set later is that of every method.
    for later in (updated(config, {"learning_rate": 0.1}), with_preset(config, "authors_code"), paper_scale(config)):
        assert later.for_method("fml").learning_rate == later.learning_rate
    assert updated(config, {"rounds": 3}).for_method("fml").learning_rate == 0.005
    for word in ("fml", "fml=much", "fml=-1", "fml=nan"):
        with pytest.raises(PfedafmError, match=f"learning_rates = '{word}' cannot be used; accepted: METHOD=RATE"):
            Config(learning_rates=(word,)).check()
    with pytest.raises(PfedafmError, match=r"learning_rates = 'fmll' cannot be used; .*did you mean fml\?"):
        check_method(Config(learning_rates=("fmll=0.1",)))


def test_a_learning_rate_in_the_command_is_that_of_every_method(tmp_path):
    (tmp_path / "mine.toml").write_text('learning_rates = ["fml=0.005"]')

    def rate(*words: str) -> float:
        return cli.parse([*words, "--config", "mine"], tmp_path, "run.py", "")[0].for_method("fml").learning_rate

    assert rate() == 0.005 and rate("--rounds", "3") == 0.005
    assert rate("--learning-rate", "0.1") == rate("--learning_rate=0.1") == 0.1
    assert rate("--learning-rates", "fml=0.3") == 0.3


def test_files(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('dataset = "cifar100"\nclasses_per_client = 10\n[pfedafm]\nmix_fixed = 0.5\n')
    config = load_config(path)
    assert (config.dataset, config.classes_per_client, config.pfedafm.mix_fixed) == ("cifar100", 10, 0.5)
    assert config.rounds == Config().rounds
    config.check()


@pytest.mark.parametrize("content", [b"rounds = ", b"rounds 3", b"\xff\xfe"])
def test_a_broken_file_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(PfedafmError, match=f"{path.name}"):
        load_config(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PfedafmError, match=r"absent\.toml"):
        load_config(tmp_path / "absent.toml")


def test_the_released_code_as_a_preset():
    config = with_preset(Config(), "authors_code").check()
    own = config.pfedafm
    assert (config.protocol, config.aggregation, config.normalisation) == ("authors", "last", "imagenet")
    assert (config.batch_size, config.local_epochs, config.rounds) == (512, 10, 500)
    assert config.flip and config.erase and config.crop
    assert own.mix_relay and own.leak_momentum and own.send_header
    assert (own.mix_learning_rate, own.mix_weight_decay) == (0.01, 1e-3)
    assert config.shared_extractor == "cnn5"


def test_the_released_code_with_one_architecture():
    config = with_preset(dataclasses.replace(Config(), architectures=("cnn1",), dataset="cifar100"), "authors_code")
    assert (config.shared_extractor, config.pfedafm.mix_learning_rate, config.normalisation) == ("cnn1", 0.1, "dataset")


def test_an_unknown_preset_is_named():
    with pytest.raises(PfedafmError, match=r"preset = 'author' .*authors_code"):
        with_preset(Config(), "author")


@pytest.mark.parametrize(("clients", "participants"), [(10, 10), (50, 10), (100, 10)])
def test_the_columns_of_the_paper(clients, participants):
    config = paper_scale(Config(), clients).check()
    assert (config.rounds, config.local_epochs, config.num_participants) == (500, 10, participants)


def test_other_columns_are_refused():
    with pytest.raises(PfedafmError, match=r"paper = 20 .*10, 50 or 100"):
        paper_scale(Config(), 20)


def test_settings_as_json_and_back():
    config = with_preset(Config(), "authors_code")
    assert updated(Config(), json.loads(json.dumps(config.as_dict()))) == config


def test_a_config_is_hashable_and_frozen():
    assert hash(Config()) == hash(Config())
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().rounds = 3  # type: ignore[misc]


def test_toml_reads_numbers_as_they_are_meant():
    assert updated(Config(), tomllib.loads("participation = 1")).check().num_participants == 100
