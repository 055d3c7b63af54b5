"""Published vectors of AES-256, against the words of our generator: the key stream of counter mode from counter 0."""

import re

import pytest
from conformance.adapters import unpacked

from dpfl_lightning.privacy import noise
from dpfl_lightning.privacy.noise import RandomGenerator

pytestmark = pytest.mark.e2e

VECTORS = "cryptography_vectors/ciphers/AES"
FIELD = re.compile(r"^(\w+) = (\w+)$", re.MULTILINE)


def vectors(path: str) -> list[dict[str, bytes]]:
    """Return the vectors of a file for encryption: key, plain text, cipher text and initial counter by their names."""
    text = unpacked(f"{VECTORS}/{path}").read_text().split("[DECRYPT]")[0]
    return [
        {name.upper(): bytes.fromhex(value) for name, value in FIELD.findall(part) if name != "COUNT"}
        for part in re.split(r"COUNT = \d+|COUNT=\d+", text)[1:]
    ]


def blocks(key: bytes, count: int) -> list[bytes]:
    stream = RandomGenerator(key).words(2 * count).tobytes()
    return [stream[16 * i : 16 * i + 16] for i in range(count)]


@pytest.mark.parametrize("file, count", [("ECBKeySbox256", 16), ("ECBVarKey256", 256)])
class TestKeyVectors:
    """NIST CAVP: the encryption of a block of zeros is the first block of the stream, for every key."""

    def test_first_block(self, file, count):
        known = vectors(f"ECB/{file}.rsp")
        assert len(known) == count
        for vector in known:
            assert vector["PLAINTEXT"] == bytes(16)
            assert blocks(vector["KEY"], 1)[0] == vector["CIPHERTEXT"]


class TestTextVectors:
    """NIST CAVP: a block of the stream is the encryption of its counter, and these texts are counters."""

    def test_counter(self, monkeypatch):
        known = vectors("ECB/ECBVarTxt256.rsp")
        assert len(known) == 128
        make = noise.modes.CTR
        for vector in known:  # no stream is so long that it reaches them from 0
            monkeypatch.setattr(noise.modes, "CTR", lambda start, text=vector["PLAINTEXT"]: make(text))
            assert blocks(vector["KEY"], 1)[0] == vector["CIPHERTEXT"]


class TestCounterVectors:
    """RFC 3686: up to three blocks, with its initial counter in the place of our 0."""

    def test_stream(self, monkeypatch):
        known = vectors("CTR/aes-256-ctr.txt")
        assert len(known) == 3
        make = noise.modes.CTR
        for vector in known:
            monkeypatch.setattr(noise.modes, "CTR", lambda start, counter=vector["IV"]: make(counter))
            stream = b"".join(blocks(vector["KEY"], 3))
            encrypted = bytes(a ^ b for a, b in zip(stream, vector["PLAINTEXT"], strict=False))
            assert encrypted == vector["CIPHERTEXT"]
