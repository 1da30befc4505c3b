"""Hundreds of random settings and command lines: each is used or refused, none ends in a traceback."""

from pathlib import Path
from typing import Literal, get_args, get_origin

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli.options import RunOptions, parse, run_name
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.method_settings import every_method, types_of
from pfedafm_jax.methods import method_names
from pfedafm_jax.methods.checks import check_names
from pfedafm_jax.runs.existing import differences

ENDS = st.sampled_from([0, 1, -1, 2**31, 2**32, 1e-320, 1e38, 1e39, 0.5, 0.1])
INTEGERS = st.one_of(st.integers(-3, 200), st.integers(-(10**400), 10**400))
TEXTS = st.one_of(st.text(max_size=12), st.binary(max_size=3))
SEVERAL = st.one_of(
    st.lists(st.text(max_size=5), max_size=3),
    st.tuples(st.integers(), st.text(max_size=2)),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)
ODD = st.one_of(st.none(), st.booleans(), st.just(np.zeros(2)), st.just(np.float32(0.5)))
ANYTHING = st.one_of(ENDS, INTEGERS, st.floats(), st.floats(0, 1), TEXTS, SEVERAL, ODD)

FIELDS = {name: field.annotation for name, field in Config.model_fields.items()} | {
    f"{method}.{name}": field.annotation
    for method, kind in every_method().items()
    for name, field in kind.model_fields.items()
}


def plausible(annotation) -> st.SearchStrategy:
    """Values of the right type, good and bad."""
    if get_origin(annotation) is Literal:
        return st.sampled_from(get_args(annotation))
    words = ["cifar10", "cifar100", "synthetic", "cnn1", "cnn5", "header", "conv1", *method_names()]
    (kind,) = types_of(annotation) - {type(None)}
    return {
        tuple: st.lists(st.sampled_from(words), max_size=4).map(tuple),
        bool: st.booleans(),
        int: st.one_of(st.integers(-1, 200), st.integers(0, 2**33)),
        str: st.sampled_from(words),
        float: st.one_of(st.floats(0, 1), st.floats(-1, 1e7), st.just(1)),
    }[kind]


@st.composite
def changes(draw) -> dict:
    """Some settings changed, as a file or a dictionary would: nested, mostly plausible, some
    absurd, some unknown."""
    names = draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=8, unique=True))
    values: dict = {}
    for name in names:
        value = draw(ANYTHING if draw(st.integers(0, 7)) == 0 else plausible(FIELDS[name]))
        outer, _, inner = name.partition(".")
        if inner and draw(st.booleans()):
            values.setdefault(outer, {})[inner] = value
        else:
            values[name] = value
    if draw(st.integers(0, 15)) == 0:
        values[draw(st.text(max_size=12))] = draw(ANYTHING)
    return values


@given(values=changes())
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@example(values={"learning_rate": 10**400})
@example(values={"min_samples": 10**400, "partition": "dirichlet"})
@example(values={"partition": np.zeros(2)})
@example(values={"method": ["pfedafm"]})
@example(values={"gamma": 1e-300, "partition": "dirichlet"})
@example(values={"num_clients": 60_001})
@example(values={"pfedafm": 3})
@example(values={"pfedafm": {3: 1}})
@example(values={"rounds": 10**5000})
def test_random_settings_are_used_or_refused(values):
    try:
        config = check_names(updated(Config(), values))
    except PfedafmError as error:
        assert len(str(error)) > 10
        return
    assert 1 <= config.num_participants <= config.num_clients
    assert differences(config.as_dict(), config) == [] and hash(config) == hash(config)


@st.composite
def command_lines(draw) -> list[str]:
    words = []
    for name in draw(st.lists(st.sampled_from(sorted(FIELDS)), max_size=4, unique=True)):
        value = draw(ANYTHING if draw(st.booleans()) else plausible(FIELDS[name]))
        shown = [str(item) for item in value] if isinstance(value, list | tuple) else [str(value)]
        words += [f"--{name.replace('_', '-')}", *(word.replace("\0", "") for word in shown)]
    extra = ["--preset", "--config", "--round", "-x", "--method", "--run-dir", "--fresh", "--", "-"]
    value = st.text(st.characters(exclude_characters="\0"), max_size=8)
    for word in draw(st.lists(st.sampled_from(extra), max_size=2)):
        words += [word, *draw(st.lists(value, max_size=1))]
    return words


@given(words=command_lines())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@example(words=["--rounds", "9" * 5000])
@example(words=["--preset", "a" * 5000])
@example(words=["--config", "a" * 5000 + ".toml"])
@example(words=["--config", "/dev/null/x.toml"])
@example(words=["--config", "."])
@example(words=["--config", "bad\ud800.toml"])
@example(words=["--run-dir", "\udcff"])
@example(words=["@file", "--method", "[1]", "--dataset", "{}"])
@example(words=["--=3", "--.=3", "---", "--fml.=3", "--fml=3"])
def test_random_command_lines_are_used_or_refused(words, capsys):
    try:
        found = parse(words, "run", "", RunOptions)
    except PfedafmError as error:
        assert len(str(error)) > 10
    except SystemExit as ended:  # --config at the end
        assert ended.code == 0
    else:
        assert found.config.num_participants >= 1 and len(found.name) <= 150


@given(config=st.text(max_size=300))
def test_the_name_of_a_run_is_one_folder_in_runs(config):
    name = run_name(config)
    assert Path(name).name == name and name not in (".", "..") and len(name) <= 100
