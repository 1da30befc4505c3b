"""The commands of a federation, as far as they go without Flower."""

import os
import socket
import stat
import sys
from types import SimpleNamespace

import pytest
from by_hand import record, run_by_hand

from pfedafm_jax.base.errors import PfedafmError
from pfedafm_jax.cli.commands import certs, node, run, serve
from pfedafm_jax.config.config import Config
from pfedafm_jax.deploy import address, check_free, needed


def test_certificates_are_for_their_owner(tmp_path, capsys):
    pytest.importorskip("pfedafm_jax.deploy.certs", exc_type=ImportError)
    words = ["--out", str(tmp_path / "certs"), "--hosts", "fl.example.org", "--clients"]
    assert certs.main([*words, "2"]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "ca.crt: for every node" in said and "nodes/client-K: for node K alone" in said
    files = sorted(path for path in (tmp_path / "certs").rglob("*") if path.is_file())
    keys = ["client-0", "client-0.pub", "client-1", "client-1.pub"]
    assert [path.name for path in files] == ["ca.crt", *keys, "server.crt", "server.key"]
    from cryptography import x509

    server = x509.load_pem_x509_certificate((tmp_path / "certs" / "server.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == ["fl.example.org", "localhost"]
    assert list(map(str, names.get_values_for_type(x509.IPAddress))) == ["127.0.0.1", "::1"]
    for path in files:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(PfedafmError, match="certificates already"):
        certs.main([*words, "2"])
    for more, said in (
        (["0"], "clients = '0' cannot be used; accepted: at least 1"),
        (["1", "--hosts", "münchen"], "hosts = 'münchen' cannot be used"),
        (["1", "--hosts", ""], "hosts = '' cannot be used; accepted: names and addresses"),
        (["1", "--hosts", "fl.example.org:18000"], "org:18000' .* without port or https"),
        (["1", "--hosts", "https://fl.example.org"], "hosts = 'https://fl"),
        (["1", "--hosts", "a..b"], r"hosts = 'a\.\.b'"),
    ):
        with pytest.raises(PfedafmError, match=said):
            certs.main([*words, *more, "--out", str(tmp_path / "more")])
    assert not (tmp_path / "more").exists()


def test_the_commands_say_what_they_lack(monkeypatch):
    for module, lacks in (("certs", "cryptography"), ("flower", "flwr")):
        monkeypatch.setitem(sys.modules, lacks, None)
        monkeypatch.delitem(sys.modules, f"pfedafm_jax.deploy.{module}", raising=False)
        with pytest.raises(PfedafmError, match=r"needs .* pip install -e '\.\[flower\]'"):
            needed(module)
    with pytest.raises(ModuleNotFoundError, match="no_module_of_ours"):  # no package would help
        needed("no_module_of_ours")
    for command, words, said in (
        (serve, ["--listen", "0.0.0.0:18000"], "listen = '0.0.0.0:18000' .* accepted: 127"),
        (serve, ["--listen", "18000"], "listen = '18000' cannot be used; accepted: HOST:PORT"),
        (serve, ["--listen", "127.0.0.1:70000"], "listen = '127.0.0.1:70000' .* HOST:PORT"),
        (serve, ["--round-timeout", "0"], "round_timeout = '0' .* accepted: above 0"),
        (serve, ["--absent-timeout", "nan"], "absent_timeout = 'nan' cannot be used"),
        (serve, ["--method", "pfedafm_released"], "method = 'pfedafm_released' cannot be used"),
        (serve, ["--coordinator", "host:1"], "--coordinator is for simulations"),
        (serve, ["--certs", "nowhere"], "certs = 'nowhere' .* pfedafm certs --clients 100; ca.crt"),
        (serve, ["--min-replies", "0"], "min_replies = '0' cannot be used; accepted: at least 1"),
        (serve, ["--min-replies", "11"], "min_replies = 11 cannot be used; accepted: 1 to 10"),
        (node, ["--server", "far:18000"], "server = 'far:18000' .* accepted: 127"),
    ):
        own = ["--client", "0", "--data", "synthetic", "--state", "s"] if command is node else []
        with pytest.raises(PfedafmError, match=said):
            command.main([*words, *own])
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(PfedafmError, match=r"accepted: an address .* free \(Address already"):
            check_free(*other.getsockname(), patience=0.0)
    assert address("listen", "[::1]:18000", None) == ("::1", 18000)
    assert address("listen", "far:18000", "certs") == ("far", 18000)


def test_a_node_ends_as_the_server_says_and_writes_for_its_owner_alone(
    tmp_path, monkeypatch, capsys
):
    """With Flower's part pretended: what the server says when it wants no more of the node."""
    asked, why = [], iter(["", "its data has 3 classes"])

    def answer_forever(*words):
        asked.append(words)
        words[4].left = next(why)

    flower = SimpleNamespace(answer_forever=answer_forever)
    monkeypatch.setitem(sys.modules, "pfedafm_jax.deploy.flower", flower)
    before = os.umask(0o022)
    try:
        words = ["--data", "mine.npz", "--state", str(tmp_path / "s"), "--client"]
        assert node.main([*words, "3"]) == 0
        assert os.umask(0o022) == 0o077 and "is finished" in capsys.readouterr().out
        assert asked[0][:4] == ("127.0.0.1:18000", None, None, tmp_path / "s" / "flower")
        certs = tmp_path / "certs"
        more = ["--server", "far:1", "--certs", str(certs)]
        for name in ("ca.crt", "nodes/client-3"):
            with pytest.raises(PfedafmError, match=f"{name} is missing; whoever ran pfedafm certs"):
                node.main([*words, "3", *more])
            (certs / name).parent.mkdir(parents=True, exist_ok=True)
            (certs / name).touch()
        with pytest.raises(PfedafmError, match=r"^its data has 3 classes$"):
            node.main([*words, "3", *more])
        assert asked[1][1:3] == (certs / "ca.crt", certs / "nodes" / "client-3")
        (tmp_path / "mine.py").write_text("raise ValueError('no plugin')")
        for last, said in ((["-1"], "client = '-1' cannot be used; accepted: at least 0"),
                           (["3", "--plugin", str(tmp_path / "mine.py")], "ValueError: no plugin")):  # fmt: skip
            with pytest.raises(PfedafmError, match=said):
                node.main([*words, *last])
    finally:
        os.umask(before)


def test_a_finished_federation_is_left_alone_and_waits_for_nobody(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "pfedafm_jax.deploy.flower", SimpleNamespace())  # not asked
    settings = Config.load("hetero_cifar10").as_dict() | {"rounds": 2}
    run_by_hand([record(1), record(2, 0.75)], tmp_path / "run", nodes=True, **settings)
    assert serve.main(["--rounds", "2", "--run-dir", str(tmp_path / "run")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "is finished already" in said and "75.00 % round 2" in said
    assert not (tmp_path / "run" / "nodes.json").exists()
    with pytest.raises(PfedafmError, match="holds a federation's run"):
        run.main(["--rounds", "2", "--run-dir", str(tmp_path / "run")])
    run_by_hand([record(1), record(2, 0.75)], tmp_path / "other", **settings)
    with pytest.raises(PfedafmError, match="holds a simulation's run"):
        serve.main(["--rounds", "3", "--run-dir", str(tmp_path / "other")])
    assert not (tmp_path / "other" / "flower").exists()
