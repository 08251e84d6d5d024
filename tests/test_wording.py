"""Numbers in sentences."""

import pytest

from genomoe.wording import counted


@pytest.mark.parametrize(
    ("number", "words"), {0: "0 rows", 1: "1 row", 2: "2 rows", 12_345: "12,345 rows"}.items(), ids=str
)
def test_a_noun_follows_its_number(number: int, words: str) -> None:
    assert counted(number, "row") == words
