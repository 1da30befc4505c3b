"""Settings: what is refused, with what words; methods' own; files; copies."""

import copy
import itertools
import json
import math
import pickle
import tomllib
from operator import attrgetter
from typing import Any, Literal

import numpy as np
import pytest
from annotated_types import Ge, Gt, Le, Lt
from pydantic import ValidationError, model_validator

from pfedafm_jax.base.checked import may_be_none, texts_of
from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.config.config import GROUPS, Config, config_names, updated
from pfedafm_jax.config.method_settings import MethodSettings, Rate, every_method, types_of
from pfedafm_jax.config.presets import presets, with_preset
from pfedafm_jax.methods import method_names
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.methods.fml import FML
from pfedafm_jax.methods.pfedafm import PFedAFM

EVERY = {name: (Config, name) for name in Config.model_fields} | {
    f"{method}.{name}": (kind, name)
    for method, kind in every_method().items()
    for name in kind.model_fields
}
"""Every setting by its full name: the model and its field."""

OF_ANOTHER_TYPE: dict[type, list] = {
    bool: [1, "yes"],
    str: [3],
    int: [2.5, True, "1"],
    float: [True, "1", math.nan, math.inf],
    tuple: ["cnn1"],
}


def limits_of(annotation: Any, metadata: list) -> list:
    """The `Ge`, `Le` and so on of a field."""
    inside = [getattr(part, "__metadata__", ()) for part in getattr(annotation, "__args__", ())]
    every = [*metadata, *itertools.chain(*inside)]
    return [limit for limit in every if isinstance(limit, Ge | Gt | Le | Lt)]


def just_outside(limit: Ge | Gt | Le | Lt, kind: type) -> list:
    """Values that a limit refuses."""
    step = 1 if kind is int else 1e-6
    if isinstance(limit, Ge):
        return [limit.ge - step]
    if isinstance(limit, Le):
        most = limit.le * (1 + 1e-6) if kind is float else limit.le
        return [most + step, 10**400]
    return [limit.gt if isinstance(limit, Gt) else limit.lt]


def wrong_values(model: type, name: str) -> list:
    """Just outside of every limit, and of other types."""
    field = model.model_fields[name]
    (kind,) = types_of(field.annotation) - {type(None)}
    wrong: list = [b"x", [1], {"a": 1}, *OF_ANOTHER_TYPE[kind]]
    if not may_be_none(model, name):
        wrong.append(None)
    for limit in limits_of(field.annotation, field.metadata):
        wrong += just_outside(limit, kind)
    if getattr(field.annotation, "__origin__", None) is Literal:
        wrong.append("nonsense")
    return wrong


@pytest.mark.parametrize("name", EVERY)
def test_every_setting_refuses_what_is_out_of_its_range_and_names_itself(name):
    model, field = EVERY[name]
    for value in wrong_values(model, field):
        with pytest.raises(PfedafmError) as caught:
            updated(Config(), {name: value})
        said = str(caught.value)
        # Of a list, the first item that is refused.
        assert said.startswith((f"{name} = ", f"{name}[")), (value, said)
        assert " cannot be used; accepted: " in said
    declared = model.model_fields[field]
    assert updated(Config(), {name: declared.default})
    assert texts_of(model)[field], "the text below the field is its help"
    # A number without both ends can hold what no 32-bit float can.
    is_number = bool(types_of(declared.annotation) & {int, float})
    assert len(limits_of(declared.annotation, declared.metadata)) == (2 if is_number else 0)


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("num_clients", 0, "at least 1"),
        ("num_clients", 20_000_000, "at most 10,000,000"),
        ("validation_fraction", 1.0, "below 1"),
        ("participation", 1.5, "at most 1"),
        ("participation", 0.001, "at least 0.01: one of 100 clients per round"),
        ("architectures", (), "a list of at least 1"),
        ("learning_rate", -1.0, "at least 0"),
        ("learning_rate", "fast", "a number"),
        ("rounds", 2.5, "a whole number"),
        ("flip", 1, "true or false"),
        ("layout", "lockstp", "auto, loop, lockstep (did you mean lockstep?)"),
        ("pfedafm.mix_fixed", 1.5, "at most 1, or none"),
        ("lg_fedavg.shared_layers", ("conv1", "conv1"), "one or more names, each once"),
        ("pfedafm", 3, "settings of pfedafm: learning_rate, mix_learning_rate"),
    ],
)
def test_an_error_says_what_is_accepted(name, value, accepted):
    with pytest.raises(PfedafmError) as caught:
        updated(Config(), {name: value})
    assert str(caught.value).startswith(f"{name} = {value!r} cannot be used; accepted: {accepted}")


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("method", "pfedfm", "did you mean pfedafm"),
        ("shared_extractor", "cnn", "cnn1, cnn2"),
        ("architectures", ("cnn1", "cn2"), "did you mean cnn2"),
        ("dataset", "cifar_100", "did you mean cifar100"),
        ("image_size", 32, "0 for cifar10, where all have one size"),
        ("partition", "pathologic", "natural (did you mean pathological?), or a file"),
        ("classes_per_client", 11, "1 to 10, the classes of cifar10"),
    ],
)
def test_names_are_checked_where_they_are_looked_up(name, value, accepted):
    config = updated(Config(), {name: value})  # a plugin may still register it
    with pytest.raises(PfedafmError, match=rf"^{name} = ") as caught:
        check_names(config)
    assert accepted in str(caught.value)


def test_whole_numbers_none_and_the_ends_of_ranges_pass():
    for name, value in [
        ("participation", 1),
        ("gamma", 1),
        ("learning_rate", 0),
        ("pfedafm.mix_fixed", 1),
        ("pfedafm.mix_fixed", None),
    ]:
        found = attrgetter(name)(updated(Config(), {name: value}))
        assert found == value and not isinstance(found, int)


def test_unknown_names_are_refused_with_the_nearest_one():
    with pytest.raises(PfedafmError, match=r"^unknown setting pfedafm\.mix_fix; .*mean mix_fixed"):
        updated(Config(), pfedafm={"mix_fix": 1})
    with pytest.raises(PfedafmError, match=r"^unknown setting round; .*did you mean rounds"):
        Config(round=3)
    with pytest.raises(PfedafmError, match=r"^unknown setting fmll; .*did you mean fml"):
        updated(Config(), {"fmll.alpha": 0.3})
    with pytest.raises(AttributeError, match="did you mean rounds"):
        _ = Config().round
    groups = [name for kind in GROUPS for name in kind.model_fields]
    assert sorted(groups) == sorted(Config.model_fields)


def test_too_few_synthetic_images_are_refused():
    with pytest.raises(PfedafmError, match=r"synthetic_samples = 119 .*at least 120"):
        Config(dataset="synthetic", synthetic_classes=20, synthetic_samples=119)


def test_updates_leave_the_rest_and_lists_become_tuples():
    changes = {"rounds": 7, "architectures": ["cnn1"], "pfedafm": {"mix_scalar": True}}
    config = updated(Config(), changes)
    own = PFedAFM.Settings(mix_scalar=True)
    assert config == Config(rounds=7, architectures=("cnn1",), pfedafm=own)
    assert updated(config, fml={"alpha": 0.3}).pfedafm.mix_scalar
    assert updated(config, {"pfedafm.mix_start": 0.5}).pfedafm.mix_scalar
    assert config.rounds == 7 and Config().rounds == 40


def test_a_methods_settings_are_read_by_name_and_by_class():
    config = Config(fml={"alpha": 0.4})
    assert config.fml.alpha == config.of(FML.Settings).alpha == 0.4
    assert config == Config(fml=FML.Settings(alpha=0.4))
    assert config.pfedafm == PFedAFM.Settings()
    assert Config(fml=FML.Settings()) == Config() and hash(Config(fml={})) == hash(Config())
    for wrong in (3, ("alpha", 0.3), PFedAFM.Settings()):
        with pytest.raises(PfedafmError, match=r"^fml = .* accepted: settings of fml: learning_ra"):
            Config(fml=wrong)


def test_a_config_cannot_be_changed_and_every_copy_is_checked():
    config = Config()
    with pytest.raises(ValidationError, match="frozen"):
        config.rounds = 3
    with pytest.raises(ValidationError, match="frozen"):
        config.fml.alpha = 0.3
    for copied in (
        lambda: updated(config, rounds=-1),
        lambda: config.model_copy(update={"rounds": -1}),
        lambda: config.__replace__(rounds=-1),  # what `copy.replace` of Python 3.13 calls
        lambda: config.fml.model_copy(update={"alpha": -1}),
    ):
        with pytest.raises(PfedafmError, match=r"= -1 cannot be used"):
            copied()
    assert copy.deepcopy(config) == config == config.model_copy()


def test_a_method_may_have_a_learning_rate_of_its_own():
    config = Config(learning_rate=0.02, fml={"learning_rate": 0.005, "alpha": 0.3})
    rates = [updated(config, method=name).rate for name in ("fml", "fd")]
    assert rates == [0.005, 0.02]
    # One that is set later is that of every method, but for those that are set with it.
    config = updated(config, method="fml")
    faster = updated(config, learning_rate=0.1)
    for later in (faster, with_preset(config, "authors_code"), with_preset(config, "paper")):
        assert later.rate == later.learning_rate and later.fml.alpha == 0.3
    assert updated(config, rounds=3).rate == 0.005
    assert updated(config, learning_rate=0.1, fml={"learning_rate": 0.3}).rate == 0.3


def test_a_record_of_a_run_has_its_own_methods_settings_only():
    config = Config(method="fml", fml={"alpha": 0.3}, fd={"gamma": 9.0})
    stored = json.loads(json.dumps(config.as_dict()))
    assert stored["fml"]["alpha"] == 0.3 and stored["fml"]["beta"] == 0.5 and "fd" not in stored
    assert Config(**stored) == Config(method="fml", fml={"alpha": 0.3})


class Own(MethodSettings):
    """Settings of nobody."""

    strength: Rate = 0.5
    """How much."""
    steps: int | None = None
    kind: Literal["hard", "soft"] = "hard"

    @model_validator(mode="after")
    def _some_steps(self):
        if self.steps == 0:
            raise ValueError("steps but 0")
        return self


def test_a_class_says_what_its_settings_are():
    assert list(Own.model_fields) == ["learning_rate", "strength", "steps", "kind"]
    assert texts_of(Own)["strength"] == "How much." and texts_of(Own)["learning_rate"]
    assert Own(strength=2).strength == 2.0
    for values, said in [
        ({"strength": -1}, "strength = -1 cannot be used; accepted: at least 0"),
        ({"steps": "1"}, "steps = '1' cannot be used; accepted: a whole number, or none"),
        ({"kind": "sof"}, r"kind = 'sof' .* hard, soft \(did you mean soft\?\)"),
        ({"steps": 0}, "settings = .* accepted: steps but 0"),
    ]:
        with pytest.raises(PfedafmError, match=rf"^{said}"):
            Own(**values)


def test_a_bare_config_is_hetero_cifar10_with_one_learning_rate_for_all_methods():
    named = Config.load("hetero_cifar10")
    low = dict.fromkeys(("fml", "fedkd", "fedapen"), 0.005)
    low |= dict.fromkeys(("fedper", "fd", "standalone", "lg_fedavg"), 0.01)
    rates = {f"{method}.learning_rate": rate for method, rate in low.items()}
    knobs = {"fml.alpha": 0.75, "fedkd.t_start": 0.98, "fedproto.lambda_mse": 10}
    assert named == updated(Config(), rates | knobs)
    usual = {"fml.alpha": 0.5, "fedkd.t_start": 0.95, "fedproto.lambda_mse": 1}
    assert updated(named, {"learning_rate": 0.02, **usual}) == Config()
    for name in config_names():
        assert all(attrgetter(m)(Config.load(name)) == attrgetter(m)(named) for m in every_method())


def test_lists_and_numbers_of_numpy_are_taken():
    config = Config(seed=np.int64(3), learning_rate=np.float32(0.5), architectures=["cnn1"])  # type: ignore[arg-type]
    assert config == Config(seed=3, learning_rate=0.5, architectures=("cnn1",))
    assert type(config.seed) is int and type(config.learning_rate) is float
    assert Config(flip=np.bool_(True), gamma=np.array(0.25)).flip is True  # type: ignore[arg-type]
    with pytest.raises(PfedafmError, match="seed = array"):
        Config(seed=np.array([3]))  # type: ignore[arg-type]


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
    config = Config.load(path)
    assert (config.dataset, config.classes_per_client) == ("cifar100", 10)
    assert (config.pfedafm.mix_fixed, config.rounds) == (0.5, Config().rounds)
    config = updated(config, dataset='folder:/data/😀 "é"', lg_fedavg={"shared_layers": ["conv1"]})
    path.write_text(config.toml("what it is\n\nfor"))
    assert Config.load(path) == config and path.read_text().startswith("# what it is\n#\n# for\n")
    assert Config(**tomllib.loads("participation = 1")).num_participants == 100


@pytest.mark.parametrize(
    "content", [b"rounds = ", b"rounds 3", b"\xff\xfe", b"x = " + b"[" * 5000, None]
)
def test_a_broken_or_missing_file_is_named(tmp_path, content):
    path = tmp_path / "run.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(PfedafmError, match=path.name):
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
    found = (one.shared_extractor, one.pfedafm_released.mix_learning_rate, one.normalisation)
    assert found == ("cnn1", 0.1, "dataset")


def test_the_length_of_the_paper():
    config = with_preset(Config(), "paper")
    assert (config.rounds, config.local_epochs, config.learning_rate) == (500, 10, 0.01)
    assert (config.num_clients, config.num_participants) == (100, 10)


def test_settings_of_earlier_versions_that_changed_no_result_are_left_out():
    assert updated(Config(), {"backend": "pmap"}) == Config()
    stored = {**Config().as_dict(), "participation": 1, "backend": "shard_map"}
    assert Config(**stored) == Config(participation=1.0)


def test_configurations_with_settings_of_every_method_can_be_pickled():
    for method in every_method():
        config = Config(**{method: {"learning_rate": 0.125}})
        assert pickle.loads(pickle.dumps(config)) == config
        assert getattr(pickle.loads(pickle.dumps(config)), method).learning_rate == 0.125
