"""Formats losses, seconds, bytes and counts for people."""

from __future__ import annotations


def format_loss(nats_per_token: float | None, bits_per_byte: float | None) -> str:
    """A loss with its units. None means that it was not finite; the logs have null for it."""
    if nats_per_token is None:
        return "not finite"
    return f"{nats_per_token:.4f} nats/token" + ("" if bits_per_byte is None else f", {bits_per_byte:.4f} bits/byte")


def format_seconds(seconds: float) -> str:
    """Seconds in a readable unit.

    >>> format_seconds(0.0123), format_seconds(4.56), format_seconds(200), format_seconds(7300)
    ('12.3 ms', '4.6 s', '3 min 20 s', '2 h 1 min')
    """
    if seconds < 0.9995:
        return f"{seconds * 1e3:.1f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def format_bytes(count: float) -> str:
    """Bytes in powers of 1000.

    >>> format_bytes(999), format_bytes(1_500_000_000)
    ('999 B', '1.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_count(count: int) -> str:
    """A count, rounded.

    >>> format_count(950), format_count(124_439_808)
    ('950', '124.4M')
    """
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
