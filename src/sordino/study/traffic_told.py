"""The bytes and hours of a deployed run, as a plan tells them in a terminal; ``traffic`` works them out."""

from __future__ import annotations

from typing import Any

from rich.console import RenderResult

from sordino.study.heartbeat import span

PACE = 4.0
"""Seconds that an exchange takes beside computing and sending: Flower's polling. Two to four were measured with four
sites on one machine."""


def render_traffic(found: dict[str, Any], shown: int) -> RenderResult:
    """What a plan says of it in a terminal."""
    if "refused" in found:
        yield f"[yellow]cannot be deployed[/yellow]: {found['refused']}"
        return
    yield (
        f"[bold]deployed[/bold]: {size(found['down'])} to the sites and {size(found['up'])} back, in all; "
        f"a turn {size(found['sites'][0]['turn_down'])} down and {size(found['sites'][0]['turn_up'])} up"
    )
    if len({(row["down"], row["up"]) for row in found["sites"]}) > 1:
        listed = [f"{row['client']} {size(row['down'])}/{size(row['up'])}" for row in found["sites"][:shown]]
        yield "  down/up by site: " + ", ".join(listed) + (", …" if len(found["sites"]) > shown else "")
    parts = ", ".join(f"{name} {span(seconds)}" for name, seconds in found["seconds"].items())
    yield (
        f"  about {span(3600 * found['hours'])}, an estimate: {parts}; {found['exchanges']} exchanges of {PACE:g} s, "
        f"{found['bandwidth']:g} Mbit/s, and sites that compute as fast as this machine; TLS, lost sites and waiting "
        "for those who come late are not in it"
    )


def size(count: float) -> str:
    """A number of bytes in words: 980 B, 12 kB, 3.4 MB."""
    for unit, word in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= unit:
            return f"{count / unit:.1f} {word}" if count < 10 * unit else f"{count / unit:.0f} {word}"
    return f"{count:.0f} B"
