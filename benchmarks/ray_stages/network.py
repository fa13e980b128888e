"""What two neighbouring stages ask of the network between their machines; computed, not measured."""

from dataclasses import dataclass

from benchmarks.pipeline_model.model import ACTIVATION_BYTES

#: Tokens of one prefill chunk: --max-num-batched-tokens.
CHUNK = 2048
#: Payload in 1538 bytes on the wire of a full Ethernet frame: 1500 bytes less 52 of IP and TCP headers.
EFFICIENCY = 1448 / 1538


@dataclass(frozen=True)
class Link:
    name: str
    gigabits: float

    @property
    def bytes_per_s(self) -> float:
        return self.gigabits * 1e9 / 8 * EFFICIENCY

    def seconds(self, tokens: int) -> float:
        """To carry the activations of `tokens` tokens once from a stage to the next."""
        return tokens * ACTIVATION_BYTES / self.bytes_per_s

    @property
    def prefill_limit(self) -> float:
        """Tokens a second that the link carries and no pipeline over it can exceed."""
        return self.bytes_per_s / ACTIVATION_BYTES


LINKS = (
    Link("1 Gbit/s Ethernet", 1),
    Link("2.5 Gbit/s Ethernet", 2.5),
    Link("10 Gbit/s Ethernet", 10),
    Link("25 Gbit/s Ethernet", 25),
)

#: (who decodes, tokens a second of all users together); rates as published for six 3090s, one user and seven.
DECODING = (("one user at 57 tokens/s", 57), ("seven users at 29 tokens/s each", 203), ("the same seven at 49", 343))


def link_table() -> str:
    head = (
        f"| link | a chunk of {CHUNK} tokens ({CHUNK * ACTIVATION_BYTES / 2**20:.0f} MiB) | "
        "prefill at most | one decoded token |\n|---|--:|--:|--:|\n"
    )
    rows = (
        f"| {link.name} | {link.seconds(CHUNK) * 1e3:.0f} ms | {link.prefill_limit:,.0f} tokens/s | "
        f"{link.seconds(1) * 1e6:.0f} µs |\n"
        for link in LINKS
    )
    return head + "".join(rows)


def decode_table() -> str:
    slowest = LINKS[0]
    head = f"| decoding | bytes/s between two stages | of {slowest.name} |\n|---|--:|--:|\n"
    rows = (
        f"| {who} | {rate * ACTIVATION_BYTES / 1e6:.1f} MB/s ({rate * ACTIVATION_BYTES * 8 / 1e6:.0f} Mbit/s) | "
        f"{rate / slowest.prefill_limit:.1%} |\n"
        for who, rate in DECODING
    )
    return head + "".join(rows)
