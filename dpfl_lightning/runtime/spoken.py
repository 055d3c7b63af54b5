"""Digests as words that people read to each other, one for each byte: the two-syllable half of the PGP word list.

Reference: Juola and Zimmermann (1996), Whole-word phonetic distances and the PGPfone alphabet.
"""

from pathlib import Path

WORDS = Path(__file__).with_name("pgp_words.txt").read_text().split()
SHORTEST = 32  # hexadecimal digits, 128 bits: nobody finds another object with so many digits of a digest


def in_both_forms(digest: str) -> str:
    """Return a digest in full, and its first digits as 16 words."""
    return f"{digest}, in words: {words_of(digest[:SHORTEST])}"


def words_of(digits: str) -> str:
    """Return a word for each two hexadecimal digits.

    >>> words_of("e58294")
    'topmost miser pluto'
    """
    return " ".join(WORDS[byte] for byte in bytes.fromhex(digits))


def digits_of(text: str) -> str:
    """Return the hexadecimal digits that digits or words mean, whatever their case, spaces and hyphens.

    Raises ValueError, which names the first word that is in neither form.

    >>> digits_of("Topmost miser-pluto"), digits_of("E582 94")
    ('e58294', 'e58294')
    """
    parts = text.lower().replace("-", " ").split()
    if not set("".join(parts)) - set("0123456789abcdef"):
        return "".join(parts)
    unknown = [part for part in parts if part not in WORDS]
    if unknown:
        raise ValueError(unknown[0])
    return bytes(map(WORDS.index, parts)).hex()
