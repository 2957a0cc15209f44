"""Masks: they cancel over all participants and over nobody else, whoever is in between."""

from __future__ import annotations

import hashlib
import stat
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from sordino.engine.federation import signing
from sordino.engine.federation.masks import (
    MARK,
    NotTheirs,
    erase_key,
    keep_key,
    load_key,
    masked,
    signed_key,
    verify_key,
)
from sordino.engine.federation.peers import Peers
from sordino.errors import BadInput, SordinoError

DIGEST = hashlib.sha256(b"a descriptor").digest()
NAMES = ["anna", "bert", "cleo", "Émile", "zoe"]


@pytest.fixture(scope="module")
def keys() -> dict[str, X25519PrivateKey]:
    return {name: X25519PrivateKey.generate() for name in NAMES}


def others(keys: dict[str, X25519PrivateKey], own: str) -> dict[str, bytes]:
    return {name: key.public_key().public_bytes_raw() for name, key in keys.items() if name != own}


def messages(keys, values, digest=DIGEST):
    return {name: masked(values[name], name, keys[name], others(keys, name), digest) for name in keys}


def total(rows) -> np.ndarray:
    return np.add.reduce([np.asarray(one).view(np.uint64) for one in rows]).view(np.int64)


def plain_mask(own: str, key: X25519PrivateKey, name: str, public: bytes, digest: bytes, width: int) -> list[int]:
    """A pair's mask as the docstring says it, number by number."""
    secret = key.exchange(X25519PublicKey.from_public_bytes(public))
    ends = sorted([(own, key.public_key().public_bytes_raw()), (name, public)])
    info = b"".join(len(who.encode()).to_bytes(4, "big") + who.encode() + their for who, their in ends) + digest
    derived = HKDF(hashes.SHA256(), 32, salt=b"sordino pair mask 1\n", info=info).derive(secret)
    stream = Cipher(ChaCha20(derived, bytes(16)), None).encryptor().update(bytes(8 * width))
    return [int.from_bytes(stream[8 * i : 8 * i + 8], "little") for i in range(width)]


def test_a_message_is_the_sum_that_the_formula_says(keys):
    values = [3, -5, 2**62, -(2**63)]
    found = masked(np.array(values), "cleo", keys["cleo"], others(keys, "cleo"), DIGEST)
    for i, value in enumerate(values):
        for name, public in others(keys, "cleo").items():
            mask = plain_mask("cleo", keys["cleo"], name, public, DIGEST, len(values))[i]
            value += mask if name > "cleo" else -mask
        assert int(found[i]) % 2**64 == value % 2**64


def test_masks_cancel_over_everybody_and_integers_wrap(keys):
    values = {name: np.random.default_rng(i).integers(-(2**63), 2**63 - 1, 50) for i, name in enumerate(NAMES)}
    np.testing.assert_array_equal(total(messages(keys, values).values()), total(values.values()))


@pytest.mark.parametrize("missing", NAMES)
def test_without_one_message_nothing_is_left(keys, missing):
    values = {name: np.zeros(50, dtype=np.int64) for name in NAMES}
    sent = messages(keys, values)
    del sent[missing]
    assert (np.abs(total(sent.values()).astype(float)) > 2**50).sum() > 45


@pytest.mark.parametrize("change", ["descriptor", "key", "participant", "name"])
def test_who_was_told_something_else_has_other_masks(keys, change):
    values = {name: np.zeros(20, dtype=np.int64) for name in NAMES}
    sent = messages(keys, values)
    told, own, digest = others(keys, "bert"), "bert", DIGEST
    if change == "descriptor":
        digest = hashlib.sha256(b"another descriptor").digest()
    elif change == "key":
        told["zoe"] = X25519PrivateKey.generate().public_key().public_bytes_raw()
    elif change == "participant":
        del told["zoe"]
    else:
        own = "beth"
    sent["bert"] = masked(values["bert"], own, keys["bert"], told, digest)
    assert (np.abs(total(sent.values()).astype(float)) > 2**50).sum() > 15


def test_one_message_alone_is_uniform_whatever_it_hides(keys):
    """Chi-square over the bytes, for two payloads that could not differ more."""
    for value in (0, 2**62 - 1):
        drawn = masked(np.full(40_000, value), "anna", keys["anna"], others(keys, "anna"), DIGEST)
        counts = np.bincount(drawn.view(np.uint8), minlength=256)
        expected = counts.sum() / 256
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert 255 - 6 * np.sqrt(510) < statistic < 255 + 6 * np.sqrt(510)


def test_two_payloads_under_one_descriptor_show_their_difference(keys):
    """Why one descriptor masks one payload, ever: the ledger holds sites to it."""
    first, second = np.arange(10), np.arange(10)[::-1].copy()
    sent = [masked(one, "anna", keys["anna"], others(keys, "anna"), DIGEST) for one in (first, second)]
    np.testing.assert_array_equal(sent[0] - sent[1], first - second)


@pytest.mark.parametrize("public", [bytes(32), (1).to_bytes(32, "little"), ((1 << 255) - 20).to_bytes(32, "little")])
def test_a_key_whose_secret_everybody_knows_is_refused(keys, public):
    with pytest.raises(NotTheirs, match="low order"):
        masked(np.zeros(3, dtype=np.int64), "anna", keys["anna"], {"bert": public}, DIGEST)


def test_masks_with_oneself_or_without_a_digest_are_a_mistake(keys):
    for peers, digest in (({"anna": bytes(32)}, DIGEST), ({}, b"")):
        with pytest.raises(SordinoError, match="SHA-256"):
            masked(np.zeros(3, dtype=np.int64), "anna", keys["anna"], peers, digest)


def test_alone_there_is_nothing_to_mask_with(keys):
    np.testing.assert_array_equal(masked(np.arange(3), "anna", keys["anna"], {}, DIGEST), np.arange(3))


def test_masks_of_twenty_sites_take_no_time():
    keys = {f"site{i}": X25519PrivateKey.generate() for i in range(21)}
    peers = others(keys, "site0")
    started = time.perf_counter()
    masked(np.zeros(28_938, dtype=np.int64), "site0", keys["site0"], peers, DIGEST)
    assert time.perf_counter() - started < 0.1


class TestSignedKeys:
    enrolled = ec.generate_private_key(ec.SECP384R1())

    def said(self, name="anna", run="run1"):
        return signed_key(self.enrolled, name, run, X25519PrivateKey.generate())

    def test_a_key_that_its_site_signed_is_believed(self):
        said = self.said()
        assert verify_key(said, "anna", "run1", self.enrolled.public_key()).hex() == said["public"]

    @pytest.mark.parametrize(("name", "run"), [("bert", "run1"), ("anna", "run2"), ("annar", "un1")])
    def test_a_key_of_another_site_or_run_is_not(self, name, run):
        with pytest.raises(NotTheirs, match="not signed for this run"):
            verify_key(self.said(), name, run, self.enrolled.public_key())

    def test_nor_is_one_that_was_exchanged_or_that_somebody_else_signed(self):
        mine, other = self.said(), ec.generate_private_key(ec.SECP384R1())
        for said in (
            {**mine, "public": self.said()["public"]},
            {**mine, "signature": ""},
            {**mine, "signature": "no digits"},
            {"public": mine["public"]},
            signed_key(other, "anna", "run1", X25519PrivateKey.generate()),
        ):
            with pytest.raises(NotTheirs, match="pinned"):
                verify_key(said, "anna", "run1", self.enrolled.public_key())

    @pytest.mark.parametrize("public", ["", "00", 7, None, "zz" * 32, "00" * 33])
    def test_what_is_no_key_is_refused(self, public):
        with pytest.raises(NotTheirs, match="X25519"):
            verify_key({"public": public, "signature": "00"}, "anna", "run1", self.enrolled.public_key())

    def test_a_signed_reply_is_no_signed_key(self):
        """One enrolment key, two uses: what is signed begins differently."""
        assert not MARK.startswith(signing.MARK)
        assert not signing.MARK.startswith(MARK)


class TestKeptKeys:
    def test_a_run_has_one_key_that_its_owner_alone_can_read(self, tmp_path: Path):
        file = tmp_path / "runs" / "run1" / "mask.key"
        first = keep_key(file)
        assert keep_key(file).private_bytes_raw() == first.private_bytes_raw()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert [one.name for one in file.parent.iterdir()] == ["mask.key"]

    def test_an_erased_key_is_gone(self, tmp_path: Path):
        file = tmp_path / "mask.key"
        first = keep_key(file)
        erase_key(file)
        erase_key(file)
        assert not file.exists()
        with pytest.raises(SordinoError, match="cannot be read"):
            load_key(file)
        assert keep_key(file).private_bytes_raw() != first.private_bytes_raw()

    def test_half_a_key_is_not_used(self, tmp_path: Path):
        (tmp_path / "mask.key").write_bytes(b"half")
        with pytest.raises(SordinoError, match="cannot be read"):
            keep_key(tmp_path / "mask.key")


class TestPeers:
    def lay(self, folder: Path, keys: dict[str, ec.EllipticCurvePrivateKey]) -> Path:
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        folder.mkdir(exist_ok=True)
        for name, key in keys.items():
            text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
            (folder / f"{name}.pub").write_bytes(text)
        return folder

    def test_names_with_one_key_are_one_site(self, tmp_path: Path):
        mine, one, two = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
        folder = self.lay(tmp_path, {"bert": one, "bertha": one, "cleo": two, "twin": mine})
        peers = Peers.read("anna", mine, folder)
        assert peers.distinct(["anna", "bert", "cleo"]) == 3
        assert peers.distinct(["anna", "bert", "bertha"]) == 2
        assert peers.distinct(["anna", "twin"]) == 1
        assert peers.distinct(["anna", "nobody", "bert"]) == 2

    def test_a_wrong_key_under_ones_own_name_is_refused(self, tmp_path: Path):
        mine, other = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
        assert Peers.read("anna", mine, self.lay(tmp_path, {"anna": mine})).pinned == {}
        with pytest.raises(BadInput, match="not the public half"):
            Peers.read("anna", mine, self.lay(tmp_path, {"anna": other}))

    def test_a_folder_that_is_not_there_is_told(self, tmp_path: Path):
        mine = ec.generate_private_key(ec.SECP256R1())
        with pytest.raises(BadInput, match=r"NAME\.pub"):
            Peers.read("anna", mine, tmp_path / "nowhere")
        assert Peers.read("anna", mine, None).distinct(["anna", "bert"]) == 1
        (tmp_path / "bert.pub").write_text("not a key")
        with pytest.raises(BadInput, match="OpenSSH"):
            Peers.read("anna", mine, tmp_path)
