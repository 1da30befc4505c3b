"""Hundreds of random settings, command lines and damaged files: each is used or refused, none ends
in a traceback."""

import json
from pathlib import Path

import numpy as np
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli.flags import every_setting
from pfedafm_jax.cli.options import parse, run_name
from pfedafm_jax.config.config import Config, updated
from pfedafm_jax.config.method_settings import Setting
from pfedafm_jax.data import Partition, load_dataset
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


FIELDS = every_setting()


def plausible(setting: Setting) -> st.SearchStrategy:
    """Values of the right type, good and bad."""
    if setting.choices:
        return st.sampled_from(setting.choices)
    words = ["cifar10", "cifar100", "synthetic", "cnn1", "cnn5", "header", "conv1", *method_names()]
    return {
        tuple: st.lists(st.sampled_from(words), max_size=4).map(tuple),
        bool: st.booleans(),
        int: st.one_of(st.integers(-1, 200), st.integers(0, 2**33)),
        str: st.sampled_from(words),
        float: st.one_of(st.floats(0, 1), st.floats(-1, 1e7), st.just(1)),
    }[setting.kind]


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
    extra = ["--preset", "--config", "--round", "-x", "--method", "--run-dir", "--fresh"]
    value = st.text(st.characters(exclude_characters="\0"), max_size=8)
    for word in draw(st.lists(st.sampled_from(extra), max_size=2)):
        words += [word, *draw(st.lists(value, max_size=1))]
    return words


@given(words=command_lines())
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@example(words=["--rounds", "9" * 5000])
@example(words=["--config", "a" * 5000 + ".toml"])
@example(words=["--config", "/dev/null/x.toml"])
@example(words=["--config", "."])
@example(words=["--config", "bad\ud800.toml"])
def test_random_command_lines_are_used_or_refused(words, capsys):
    try:
        config, options = parse(words, "run", "")
    except PfedafmError as error:
        assert str(error)
    except SystemExit as error:
        assert error.code == 2 or (error.code == 0 and {"--config", "--help", "-h"} & set(words))
    else:
        assert check_names(config) is config
        if "--run-dir" not in words:
            assert options.run_dir.parent == Path("runs") and ".." not in options.run_dir.parts
    capsys.readouterr()


@given(config=st.text(max_size=30))
@settings(max_examples=100)
@example(config="../../etc/passwd.toml")
@example(config="...toml")
@example(config="..")
def test_the_name_of_a_run_is_one_folder_in_runs(config):
    name = run_name(config)
    assert Path(name).name == name and name not in (".", "..") and "/" not in name
    assert len(name) <= 100


@st.composite
def damages(draw):
    """A function that changes bytes."""
    kind = draw(st.sampled_from(["flip", "cut", "insert"]))
    at, bit = draw(st.floats(0, 1)), draw(st.integers(0, 7))

    def damaged(content: bytes) -> bytes:
        index = min(int(at * len(content)), len(content) - 1)
        before, after = content[:index], content[index:]
        if kind == "flip":
            return before + bytes([after[0] ^ (1 << bit)]) + after[1:]
        return before + (after[1 + bit :] if kind == "cut" else b"\x80" * (bit + 1) + after)

    return damaged


@given(damaged=damages())
@settings(max_examples=80, deadline=None)
def test_a_damaged_split_file_is_refused_or_harmless(damaged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "damaged-partition.npz"
    rows = tuple(np.arange(3 * client, 3 * client + 3, dtype=np.int32) for client in range(4))
    whole = Partition(rows, rows, tuple(row[:0] for row in rows))
    whole.save(path)
    path.write_bytes(damaged(path.read_bytes()))
    try:
        read = Partition.load(path)
    except PfedafmError as error:
        assert str(path) in str(error)
    else:
        assert len(read.train) == len(read.test) == len(read.validation)


@given(damaged=damages())
@settings(max_examples=150, deadline=None)
def test_damaged_json_of_users_is_refused_or_gives_rows(damaged, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "leaf" / "train" / "damaged.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    own = {name: {"x": [[0.5, 1.0], [2.0, 3.0]], "y": [0, 1]} for name in ("ann", "bob")}
    content = {"users": ["ann", "bob"], "num_samples": [2, 2], "user_data": own}
    path.write_bytes(damaged(json.dumps(content).encode()))
    try:
        found = load_dataset(f"leaf:{path.parents[1]}")
    except PfedafmError as error:
        assert "leaf" in str(error)
    else:
        assert found.users is not None and len(found.images) == len(found.labels) == 4
