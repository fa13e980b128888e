"""What options of several benchmarks are made of."""


def numbers(text: str) -> list[int]:
    """8192,65536 as a list."""
    return [int(part) for part in text.split(",")]
