"""DNA letters and token ids: complement, IUPAC rules and the tokenizers, all by lookup table.

Case never changes a token. ``U`` is read as ``T``. The other IUPAC codes (R Y S W K M B D H V) and N become the
unknown-base token, except in the byte alphabet, where each letter has its own id. Any other character is an error,
never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from genomoe.genome.errors import GenoMoEError

Sequence: TypeAlias = "bytes | bytearray | memoryview | str | np.ndarray"

BASES = b"ACGT"
IUPAC = b"ACGTURYSWKMBDHVN"
"""Every letter that may stand in a nucleotide sequence, upper-case."""

_COMPLEMENT_TABLE = bytes.maketrans(b"ACGTURYSWKMBDHVNacgturyswkmbdhvn", b"TGCAAYRSWMKVHDBNtgcaayrswmkvhdbn")
COMPLEMENT = np.frombuffer(_COMPLEMENT_TABLE, dtype=np.uint8)
"""[256] complement of every byte, case kept; bytes that are no nucleotide code map to themselves."""

_INVALID = 255


def reverse_complement(sequence: bytes) -> bytes:
    """The other strand, read 5' to 3': IUPAC aware (R <-> Y, ...), case kept, U paired as T.

    A ``U`` becomes ``A``, and an ``A`` becomes ``T``, so RNA comes back as DNA.
    """
    return sequence.translate(_COMPLEMENT_TABLE)[::-1]


def to_bytes(sequence: Sequence) -> bytes:
    """The letters of `sequence` as bytes; raises GenoMoEError unless it is ASCII text or a uint8 array."""
    if isinstance(sequence, str):
        try:
            return sequence.encode("ascii")
        except UnicodeEncodeError as error:
            raise GenoMoEError(
                f"The sequence holds {sequence[error.start]!r} at position {error.start}, which is not ASCII; "
                "only nucleotide codes are allowed."
            ) from None
    if isinstance(sequence, np.ndarray):
        if sequence.dtype != np.uint8:
            raise GenoMoEError(f"A sequence array must hold uint8 letters, got {sequence.dtype}.")
        return sequence.tobytes()
    return bytes(sequence)


@runtime_checkable
class Tokenizer(Protocol):
    """What turns letters into ids and back. Implementations are picklable and hold no torch."""

    name: str
    vocab_size: int
    pad_id: int
    bos_id: int
    eos_id: int
    unk_id: int
    """The id of N (and of every ambiguity code, unless the alphabet gives each its own)."""
    base_ids: tuple[int, int, int, int]
    """Ids of A, C, G and T."""
    bases_per_token: int
    complement_ids: np.ndarray | None
    """[vocab_size] id of the complementary base (specials map to themselves); None where a token isn't one base."""
    table: bytes | None
    """[256] letter to id, 255 for letters that are refused; None where a token isn't one base."""

    def encode(self, sequence: Sequence) -> np.ndarray: ...

    def decode(self, ids: np.ndarray) -> str: ...

    def to_dict(self) -> dict[str, Any]: ...


class BaseTokenizer:
    """One token per base through a 256-entry table; the shared part of the single-base tokenizers.

    `letters` maps each upper-case letter to its id; `decoded` maps each id to the letter it prints.
    """

    bases_per_token = 1

    def __init__(
        self,
        *,
        name: str,
        letters: Mapping[str, int],
        vocab_size: int,
        pad_id: int,
        bos_id: int,
        eos_id: int,
    ) -> None:
        if max(letters.values()) >= min(vocab_size, _INVALID) or min(letters.values()) < 0:
            raise GenoMoEError(
                f"The {name} tokenizer's letter ids must lie in [0, {min(vocab_size, _INVALID)}), "
                f"got {min(letters.values())}..{max(letters.values())}."
            )
        self.name = name
        self.vocab_size = vocab_size
        self.pad_id, self.bos_id, self.eos_id = pad_id, bos_id, eos_id
        self.unk_id = letters["N"]
        self.base_ids = (letters["A"], letters["C"], letters["G"], letters["T"])
        table = np.full(256, _INVALID, dtype=np.uint8)
        for letter in IUPAC.decode():
            token = letters["T"] if letter == "U" else letters.get(letter, self.unk_id)
            table[ord(letter)] = table[ord(letter.lower())] = token
        self.table: bytes | None = table.tobytes()
        decoded = np.full(vocab_size, ord("N"), dtype=np.uint8)
        self.complement_ids: np.ndarray | None = np.arange(vocab_size)
        for letter, token in letters.items():
            if letter != "U":
                decoded[token] = ord(letter)
                self.complement_ids[token] = table[COMPLEMENT[ord(letter)]]
        self._decoded = decoded

    def encode(self, sequence: Sequence) -> np.ndarray:
        """Ids, uint8, one per base.

        Raises GenoMoEError for a character that is no nucleotide code, naming it and its position.
        """
        assert self.table is not None
        raw = to_bytes(sequence)
        ids = raw.translate(self.table)
        bad = ids.find(_INVALID)
        if bad >= 0:
            raise GenoMoEError(
                f"{chr(raw[bad])!r} at position {bad} is not a nucleotide code; allowed are {IUPAC.decode()} "
                "in either case."
            )
        return np.frombuffer(ids, dtype=np.uint8)

    def decode(self, ids: np.ndarray) -> str:
        """Upper-case letters for `ids`; special tokens are left out, the unknown base prints as N."""
        ids = np.asarray(ids).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() >= self.vocab_size):
            raise GenoMoEError(f"Token ids must lie in [0, {self.vocab_size}), got {ids.min()}..{ids.max()}.")
        special = np.isin(ids, self._specials())
        return self._decoded[ids[~special]].tobytes().decode("ascii")

    def _specials(self) -> np.ndarray:
        return np.array([i for i in range(self.vocab_size) if i not in self._letter_ids()])

    def _letter_ids(self) -> set[int]:
        return set(self.table or b"") - {_INVALID}

    def to_dict(self) -> dict[str, Any]:
        """What make_tokenizer needs to build the same tokenizer again, and its ids for readers; JSON-ready."""
        return {"name": self.name, **_ids_of(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(repr(self.to_dict()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.to_dict()})"


class NucleotideTokenizer(BaseTokenizer):
    """The default: PAD 0, BOS 1, EOS 2, MASK 3, A 4, C 5, G 6, T 7, N 8; 16 ids, so that shapes stay aligned."""

    mask_id = 3

    def __init__(self) -> None:
        super().__init__(
            name="nucleotide",
            letters={"A": 4, "C": 5, "G": 6, "T": 7, "N": 8},
            vocab_size=16,
            pad_id=0,
            bos_id=1,
            eos_id=2,
        )


class MappedTokenizer(BaseTokenizer):
    """One token per base with ids of the user's choice, to read another project's checkpoint.

    `ids` holds A, C, G, T and N, and optionally other IUPAC letters; `special` holds pad, bos and eos.
    """

    def __init__(self, *, ids: Mapping[str, int], special: Mapping[str, int], vocab_size: int) -> None:
        missing = [letter for letter in "ACGTN" if letter not in ids]
        missing += [key for key in ("pad", "bos", "eos") if key not in special]
        unknown = [key for key in special if key not in ("pad", "bos", "eos")]
        unknown += [letter for letter in ids if letter not in IUPAC.decode()]
        if missing or unknown:
            raise GenoMoEError(
                f"A mapped tokenizer needs ids for A, C, G, T, N and special ids pad, bos, eos; "
                f"missing {missing}, not known {unknown}."
            )
        if not all(0 <= value < vocab_size for value in special.values()):
            raise GenoMoEError(f"Special ids must lie in [0, {vocab_size}), got {dict(special)}.")
        self._ids = {letter: int(value) for letter, value in ids.items()}
        self._special = {key: int(value) for key, value in special.items()}
        super().__init__(
            name="mapped",
            letters=self._ids,
            vocab_size=int(vocab_size),
            pad_id=self._special["pad"],
            bos_id=self._special["bos"],
            eos_id=self._special["eos"],
        )

    def to_dict(self) -> dict[str, Any]:
        """The whole id map."""
        return {"name": "mapped", "ids": self._ids, "special": self._special, **_ids_of(self)}


class ByteTokenizer(BaseTokenizer):
    """Evo 2's ids: a token is the letter's ASCII code; end of document 0, padding 1, 512 ids.

    Letters are upper-cased first (case never changes a token here; Evo 2 itself was trained on upper-case
    with soft-masked bases down-weighted) and U becomes T. Each IUPAC code keeps its own id.
    Source: ``CharLevelTokenizer`` of Evo 2's inference code (eod 0, eos 0, pad 1, ids are bytes).
    """

    def __init__(self) -> None:
        super().__init__(
            name="byte",
            letters={letter: ord(letter) for letter in IUPAC.decode() if letter != "U"},
            vocab_size=512,
            pad_id=1,
            bos_id=0,
            eos_id=0,
        )


class KmerTokenizer:
    """Non-overlapping k-mers: token = 16 + the k-mer read in base 4 (A 0, C 1, G 2, T 3; first base heaviest).

    The remainder rule: the last ``len % k`` bases are single-base tokens (A 4, C 5, G 6, T 7, N 8), so nothing
    is lost and decode(encode(s)) has the length of s. A k-mer with any ambiguity code is the token 9, which
    decodes to k letters N. Ids below 16 are those of NucleotideTokenizer.
    """

    complement_ids: np.ndarray | None = None
    table: bytes | None = None
    pad_id, bos_id, eos_id, mask_id, unk_id = 0, 1, 2, 3, 8
    unknown_kmer_id = 9
    first_kmer_id = 16
    base_ids = (4, 5, 6, 7)

    def __init__(self, k: int) -> None:
        if isinstance(k, bool) or not isinstance(k, int) or not 2 <= k <= 8:
            raise GenoMoEError(f"A k-mer tokenizer needs 2 <= k <= 8, got {k!r}; for k = 1 use 'nucleotide'.")
        self.name = f"kmer{k}"
        self.bases_per_token = k
        self.vocab_size = self.first_kmer_id + 4**k
        self.bases = NucleotideTokenizer()
        """Turns single bases into the input of encode_bases."""

    def encode(self, sequence: Sequence) -> np.ndarray:
        """Ids, int32: ``len // k`` k-mer tokens, then ``len % k`` single-base tokens."""
        return self.encode_bases(self.bases.encode(sequence))

    def encode_bases(self, bases: np.ndarray) -> np.ndarray:
        """The same from NucleotideTokenizer's ids; the last axis is the sequence."""
        k = self.bases_per_token
        whole = bases.shape[-1] // k * k
        digits = bases[..., :whole].reshape(*bases.shape[:-1], -1, k).astype(np.int32) - 4
        kmers = digits @ (4 ** np.arange(k - 1, -1, -1, dtype=np.int32)) + self.first_kmer_id
        kmers[(digits > 3).any(axis=-1)] = self.unknown_kmer_id
        return np.concatenate([kmers, bases[..., whole:].astype(np.int32)], axis=-1)

    def decode(self, ids: np.ndarray) -> str:
        """Upper-case letters; special tokens are left out."""
        out = []
        for token in np.asarray(ids).reshape(-1).tolist():
            if not 0 <= token < self.vocab_size:
                raise GenoMoEError(f"Token ids must lie in [0, {self.vocab_size}), got {token}.")
            if token >= self.first_kmer_id:
                value = token - self.first_kmer_id
                k = self.bases_per_token
                out.append("".join("ACGT"[(value >> (2 * (k - 1 - i))) & 3] for i in range(k)))
            elif token == self.unknown_kmer_id:
                out.append("N" * self.bases_per_token)
            elif 4 <= token <= 8:
                out.append("ACGTN"[token - 4])
        return "".join(out)

    def to_dict(self) -> dict[str, Any]:
        """What make_tokenizer needs to build the same tokenizer again, and its ids for readers; JSON-ready."""
        return {"name": self.name, **_ids_of(self)}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KmerTokenizer) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"KmerTokenizer(k={self.bases_per_token})"


_DERIVED = ("vocab_size", "pad_id", "bos_id", "eos_id", "unk_id", "base_ids", "bases_per_token")


def _ids_of(tokenizer: Tokenizer) -> dict[str, Any]:
    values = {key: getattr(tokenizer, key) for key in _DERIVED}
    return {**values, "base_ids": list(tokenizer.base_ids)}


def make_tokenizer(spec: str | Mapping[str, Any] | Tokenizer) -> Tokenizer:
    """Build a tokenizer from its name ('nucleotide', 'byte', 'kmer3'...) or from what its to_dict() gave.

    A name that ends in .json is a file with such a dict, as every model folder holds.

    Raises GenoMoEError for an unknown name, and for a dict whose ids aren't those of the tokenizer it names.
    """
    if isinstance(spec, Tokenizer) and not isinstance(spec, Mapping | str):
        return spec
    if isinstance(spec, str) and spec.endswith(".json"):
        spec = _read_description(Path(spec))
    options: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("name", None)
    stated = {key: options.pop(key) for key in _DERIVED if key in options and (name, key) != ("mapped", "vocab_size")}
    tokenizer = _build(name, options)
    actual = _ids_of(tokenizer)
    for key, value in stated.items():
        if (list(value) if key == "base_ids" else value) != actual[key]:
            raise GenoMoEError(
                f"The description of the {name!r} tokenizer says {key} {value}, but it has {actual[key]}."
            )
    return tokenizer


def _read_description(path: Path) -> dict[str, Any]:
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GenoMoEError(f"{path} does not describe a tokenizer: it is not JSON ({error}).") from error
    if not isinstance(described, dict) or "name" not in described:
        raise GenoMoEError(f"{path} does not describe a tokenizer: give the tokenizer.json of a GenoMoE model folder.")
    return described


def _build(name: object, options: dict[str, Any]) -> Tokenizer:
    if name == "mapped":
        missing = sorted({"ids", "special", "vocab_size"} - set(options))
        if missing or len(options) > 3:
            raise GenoMoEError(f"A mapped tokenizer takes ids, special and vocab_size; got {sorted(options)}.")
        return MappedTokenizer(**options)
    if options:
        raise GenoMoEError(f"The {name!r} tokenizer takes no options, got {sorted(options)}.")
    if name == "nucleotide":
        return NucleotideTokenizer()
    if name == "byte":
        return ByteTokenizer()
    if isinstance(name, str) and name.startswith("kmer") and name[4:].isdigit():
        return KmerTokenizer(int(name[4:]))
    raise GenoMoEError(f"No tokenizer is called {name!r}; choose nucleotide, byte, kmer2..kmer8 or mapped.")
