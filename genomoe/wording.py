"""Words around numbers."""


def counted(number: int, noun: str) -> str:
    """A number with its noun in the singular or plural: "1 row", "2 rows", "12,345 rows"."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"
