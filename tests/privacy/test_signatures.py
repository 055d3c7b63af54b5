"""Clients sign the head of their ledger: after every charge, with keys that never leave their folder."""

import base64
import json
import shutil
import subprocess

import pytest
import torch
from conftest import FIXED_KEY, PowerCut, break_off, private
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1
from cryptography.hazmat.primitives.asymmetric.ec import generate_private_key as elliptic_key
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from key_pairs import make_keys, private_pem, public_pem

from dpfl_lightning.build import build_loop
from dpfl_lightning.config.load import from_mapping
from dpfl_lightning.config.options import PrivacyOptions
from dpfl_lightning.errors import UserError, UserNotice
from dpfl_lightning.fit import main as fit
from dpfl_lightning.plan import main
from dpfl_lightning.privacy.accounting.events import GaussianEvent
from dpfl_lightning.privacy.ledger import signatures
from dpfl_lightning.privacy.ledger.file import Charge, Header, read_head
from dpfl_lightning.privacy.ledger.ledger import Ledger

BUDGETS = [4.0, 6.0, 8.0, 10.0]


@pytest.fixture
def keys(tmp_path):
    return make_keys(tmp_path / "keys")


def signed_by(folder, **options):
    return PrivacyOptions(epsilon=BUDGETS, delta=1e-3, signing_keys=str(folder), **options)


def verified(run, folder) -> int:
    return main(["--ledger", str(run), "--public_keys", str(folder)])


# ---- keys


def encrypted(file):
    file.write_bytes(private_pem(Ed25519PrivateKey.generate(), b"secret"))


BAD = {
    "no folder": (lambda folder: shutil.rmtree(folder), "`privacy.signing_keys` must be a folder with a key client-"),
    "empty": (
        lambda folder: [one.unlink() for one in folder.iterdir()],
        "must hold at least one key client-<number>.pem",
    ),
    "misnamed": (
        lambda folder: (folder / "client-1.pem").rename(folder / "client_1.pem"),
        "must hold keys named client-0.pem to client-3.pem, got 'client_1.pem'",
    ),
    "of no client": (
        lambda folder: (folder / "client-1.pem").rename(folder / "client-4.pem"),
        "must hold keys named client-0.pem to client-3.pem, got 'client-4.pem'",
    ),
    "another ending": (
        lambda folder: (folder / "client-1.pem").rename(folder / "client-1.PEM"),
        "must hold keys named client-0.pem to client-3.pem, got 'client-1.PEM'",
    ),
    "no key": (
        lambda folder: (folder / "client-1.pem").write_text("words"),
        "client-1.pem` must be an Ed25519 private key in PEM without a password, got",
    ),
    "password": (
        lambda folder: encrypted(folder / "client-1.pem"),
        "client-1.pem` must be an Ed25519 private key in PEM without a password, got 'Password was not given",
    ),
    "other algorithm": (
        lambda folder: (folder / "client-1.pem").write_bytes(private_pem(elliptic_key(SECP256R1()))),
        "client-1.pem` must be an Ed25519 private key in PEM without a password, got 'ECPrivateKey'",
    ),
    "public key": (
        lambda folder: (folder / "client-1.pem").write_bytes(public_pem(Ed25519PrivateKey.generate())),
        "client-1.pem` must be an Ed25519 private key in PEM without a password, got",
    ),
    "a folder": (
        lambda folder: ((folder / "client-1.pem").unlink(), (folder / "client-1.pem").mkdir()),
        "client-1.pem` must be an Ed25519 private key in PEM without a password, got",
    ),
}


def test_a_bad_key_is_one_sentence_before_anything_is_charged(make_loop, tmp_path):
    for number, (change, words) in enumerate(BAD.values()):
        folder = make_keys(tmp_path / str(number)) / "private"
        change(folder)
        loop = make_loop(privacy=signed_by(folder), rounds=1)
        with pytest.raises(UserError) as error:
            loop.run()
        assert words in str(error.value) and "\n" not in str(error.value)
        assert not (loop.output_dir / "ledger.jsonl").exists()
    again = make_loop(privacy=signed_by(make_keys(tmp_path / "good") / "private"), output_dir=loop.output_dir, rounds=1)
    assert again.run().finished, "with good keys, it begins"


def test_a_key_that_others_may_read_is_a_warning(keys):
    (keys / "private" / "client-2.pem").chmod(0o640)
    with pytest.warns(UserNotice, match="client-2.pem may be read by other users of this machine.*chmod 600"):
        signatures.private_keys(keys / "private", 4)


def test_keys_for_verification_are_public_ones(make_loop, keys, capsys):
    loop = make_loop(privacy=signed_by(keys / "private"), rounds=1)
    loop.run()
    assert verified(loop.output_dir, keys / "private") == 2
    assert "client-0.pem` must be an Ed25519 public key in PEM" in capsys.readouterr().err
    assert verified(loop.output_dir, keys / "nowhere") == 2
    assert "`--public_keys` must be a folder with a key" in capsys.readouterr().err
    (keys / "public" / "client-2.pem").unlink()
    assert verified(loop.output_dir, keys / "public") == 0
    assert "signed by the holders of the keys of client 0, 1, 3." in capsys.readouterr().out


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_openssl_makes_the_keys_and_verifies_a_signature(tmp_path):
    """The commands of `docs/ledger.md`; and a third party needs nothing of this package."""
    key, public = tmp_path / "client-0.pem", tmp_path / "public.pem"
    subprocess.run(["openssl", "genpkey", "-algorithm", "ed25519", "-out", key], check=True)
    subprocess.run(["openssl", "pkey", "-in", key, "-pubout", "-out", public], check=True)
    ledger = Ledger(tmp_path / "ledger.jsonl", header(1), keys=signatures.private_keys(tmp_path_of(key), 1))
    content = json.loads((tmp_path / "ledger.signatures").read_text())
    head = content["head"]
    text = f"dpfl_lightning ledger head\nclient 0\nrun {head['run']}\nlines {head['lines']}\nchain {head['chain']}\n"
    (tmp_path / "message").write_text(text)
    (tmp_path / "signature").write_bytes(bytes.fromhex(content["signatures"]["0"]))
    check = ["pkeyutl", "-verify", "-rawin", "-pubin", "-inkey", public, "-in", tmp_path / "message"]
    subprocess.run(["openssl", *check, "-sigfile", tmp_path / "signature"], check=True, capture_output=True)
    assert read_head(ledger.path).as_dict() == head


def tmp_path_of(key):
    """A folder with this key alone."""
    folder = key.parent / "keys"
    folder.mkdir()
    shutil.copy(key, folder / key.name)
    return folder


# ---- when it is signed


def header(clients=4):
    return Header("rdp", "add_remove", "poisson", (1e-4,) * clients, (9.0,) * clients)


def charges(round):
    return [Charge(client, round, "train", GaussianEvent(0.1, 1.5, 10)) for client in range(4)]


def test_every_head_is_signed_before_a_charge_returns(tmp_path, keys):
    ledger = Ledger(tmp_path / "ledger.jsonl", header(), keys=signatures.private_keys(keys / "private", 4))
    for round in (1, 2, 3):
        assert signatures.read_signatures(ledger.path).head == ledger.head == read_head(ledger.path)
        assert verified(ledger.path, keys / "public") == 0
        ledger.charge(charges(round))


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_crash_between_the_head_and_its_signatures_is_no_dead_end(tmp_path, keys, monkeypatch, at):
    """At the head of 0 lines, that of the header, and that of a charge."""
    path, private_of_clients = tmp_path / "ledger.jsonl", signatures.private_keys(keys / "private", 4)
    write, writes = signatures.write_signatures, []

    def failing(*given):
        writes.append(given)
        return write(*given) if len(writes) <= at else 1 / 0

    with monkeypatch.context() as patch:
        patch.setattr(signatures, "write_signatures", failing)
        with pytest.raises(ZeroDivisionError):
            Ledger(path, header(), keys=private_of_clients).charge(charges(1))
    assert at < 2 or verified(path, keys / "public") == 0
    again = Ledger(path, header(), keys=private_of_clients)
    assert again.used(0, "train") == (1 if at == 2 else 0)
    assert at == 0 or signatures.read_signatures(path).head != again.head, "nobody has compared it with the plan yet"
    again.accept()
    assert signatures.read_signatures(path).head == again.head and verified(path, keys / "public") == 0


def test_without_keys_nothing_is_signed(make_loop):
    loop = make_loop(rounds=1)
    loop.run()
    assert not (loop.output_dir / "ledger.signatures").exists()


@pytest.mark.parametrize("client", ["-1", "00", " 0", "\u0665", "1.0"])
def test_a_client_is_named_by_its_number_only(tmp_path, keys, client):
    path = tmp_path / "ledger.jsonl"
    Ledger(path, header(), keys=signatures.private_keys(keys / "private", 4)).close()
    file = signatures.signature_file(path)
    content = json.loads(file.read_text())
    content["signatures"][client] = "00"
    file.write_text(json.dumps(content))
    with pytest.raises(UserError, match="must hold a head and hexadecimal signatures of clients"):
        signatures.read_signatures(path)


# ---- a resumed run


def test_a_resumed_run_is_signed_to_its_end_also_from_another_folder(make_loop, keys, tmp_path):
    loop = break_off(make_loop(privacy=signed_by(keys / "private", reserve_rounds=1)), 2)
    assert verified(loop.output_dir, keys / "public") == 0
    shutil.move(keys / "private", tmp_path / "moved")
    again = make_loop(privacy=signed_by(tmp_path / "moved", reserve_rounds=1), output_dir=loop.output_dir)
    assert again.run(resume=True).finished and verified(loop.output_dir, keys / "public") == 0


def test_the_same_clients_must_sign_a_resumed_run(make_loop, keys, tmp_path):
    folder = break_off(make_loop(privacy=signed_by(keys / "private", reserve_rounds=1)), 2).output_dir
    ledger = (folder / "ledger.jsonl").read_bytes()
    same = "`privacy.signing_keys` must hold the keys of the clients that sign .*, which are "
    others = {
        same + r"0, 1, 2, 3, got 'none'": None,
        same + r"0, 1, 2, 3, got '0, 1'": make_keys(tmp_path / "fewer", range(2)) / "private",
        "got another signature for client 0, 1, 2, 3": make_keys(tmp_path / "other") / "private",
    }
    for words, signing in others.items():
        privacy = PrivacyOptions(epsilon=BUDGETS, delta=1e-3, reserve_rounds=1, signing_keys=signing and str(signing))
        with pytest.raises(UserError, match=words):
            make_loop(privacy=privacy, output_dir=folder).run(resume=True)
    (folder / "ledger.signatures").unlink()
    with pytest.raises(UserError, match=same + "none, got '0, 1, 2, 3'"):
        make_loop(privacy=signed_by(keys / "private", reserve_rounds=1), output_dir=folder).run(resume=True)
    assert (folder / "ledger.jsonl").read_bytes() == ledger


def test_a_ledger_that_was_rewritten_while_its_run_was_interrupted_is_not_signed(tmp_path, keys):
    private_of_clients = signatures.private_keys(keys / "private", 4)
    path = tmp_path / "ledger.jsonl"
    honest = Ledger(path, first := header(), keys=private_of_clients)
    honest.charge(charges(1))
    honest.close()
    kept = (tmp_path / "ledger.signatures").read_bytes()
    for name in ("ledger.jsonl", "ledger.head"):
        (tmp_path / name).unlink()
    forged = Ledger(path, first)
    forged.charge([Charge(client, 1, "train", GaussianEvent(0.1, 99.0, 10)) for client in range(4)])
    forged.close()
    (tmp_path / "ledger.signatures").write_bytes(kept)
    with pytest.raises(UserError, match=r"line 5 a chain that differs from that in `ledger.signatures`"):
        Ledger(path, first, keys=private_of_clients)
    content = json.loads(kept)
    content["head"] = read_head(path).as_dict()
    (tmp_path / "ledger.signatures").write_text(json.dumps(content))
    with pytest.raises(UserError, match="got another signature for client 0, 1, 2, 3: the ledger was rewritten"):
        Ledger(path, first, keys=private_of_clients)


# ---- keys stay where they are


def test_a_key_is_nowhere_in_the_run_and_changes_nothing(make_loop, keys):
    signed = make_loop(privacy=private(BUDGETS, signing_keys=str(keys / "private")), rounds=2)
    signed.run()
    plain = make_loop(privacy=private(BUDGETS), rounds=2)
    plain.run()
    assert torch.equal(signed.state.models, plain.state.models), "the noise of a simulation does not depend on it"
    identities = [{**loop.clients.folder.header().identity, "records": None} for loop in (signed, plain)]
    assert identities[0] == identities[1], "nor does the identity of a run, except for the key of its digests"
    assert "signing_keys" not in (signed.output_dir / "ledger.jsonl").read_text()
    for file in (keys / "private").iterdir():
        lines = file.read_bytes().splitlines()
        secret = base64.b64decode(lines[1])[-32:]
        for written in filter(lambda one: one.is_file(), signed.output_dir.rglob("*")):
            content = written.read_bytes()
            assert not any(form in content for form in (lines[1], secret, secret.hex().encode())), written


@pytest.mark.e2e
def test_the_commands(tmp_path, keys, in_the_repository, capsys):
    """The options file has the path, and another one can be given to a resumed run."""
    run = tmp_path / "run"
    argv = ["--config", "conf/digits.yaml", "--rounds", "2", "--tracking", "null", "--privacy.noise_key", FIXED_KEY]
    assert (
        fit(
            [
                *argv,
                "--privacy.signing_keys",
                str(make_keys(tmp_path / "k", range(5)) / "private"),
                "--output_dir",
                str(run),
            ]
        )
        == 0
    )
    assert f"signing_keys: {tmp_path / 'k' / 'private'}" in (run / "options.yaml").read_text()
    assert verified(run, tmp_path / "k" / "public") == 0
    shutil.move(tmp_path / "k" / "private", tmp_path / "elsewhere")
    capsys.readouterr()
    assert fit(["--resume", str(run)]) == 2
    moved = capsys.readouterr().err
    assert f"got '{tmp_path / 'k' / 'private'}'. Give its path if it was moved." in moved
    assert fit(["--resume", str(run), "--privacy.signing_keys", str(tmp_path / "elsewhere")]) == 0


def test_a_relative_folder_of_keys_is_stored_whole(keys, tmp_path, monkeypatch):
    monkeypatch.chdir(keys)
    privacy = {"epsilon": 8.0, "delta": 1e-3, "signing_keys": "private"}
    options = from_mapping({"data": {"name": "digits"}, "privacy": privacy, "output_dir": str(tmp_path / "run")})
    assert build_loop(options).options["privacy"]["signing_keys"] == str(keys / "private")


def test_other_exact_times_are_named(make_loop, tmp_path):
    make_loop(privacy=PrivacyOptions(epsilon=BUDGETS, delta=1e-3), rounds=1).run()
    again = {"exact_times": True, "output_dir": tmp_path / "run1"}
    with pytest.raises(UserError, match=r"`evaluation.exact_times` must stay False, .*, got True"):
        make_loop(privacy=PrivacyOptions(epsilon=BUDGETS, delta=1e-3), rounds=1, **again).run(resume=True)


def test_a_power_cut_during_training_leaves_a_signed_ledger(make_loop, keys):
    loop = make_loop(privacy=signed_by(keys / "private"))
    engine = loop.clients.engine

    def train(plan, models, numbers, raw_weights):
        assert signatures.read_signatures(loop.clients.folder.ledger_file).head == loop.clients.ledger.head
        raise PowerCut

    engine.train = train
    with pytest.raises(PowerCut):
        loop.run()
    assert verified(loop.output_dir, keys / "public") == 0
