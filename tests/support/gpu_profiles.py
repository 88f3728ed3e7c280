"""A GPU profile small enough to add up by hand."""

from __future__ import annotations

from pathlib import Path

CHUNKS, PREFIXES, DECODES, CONTEXTS = (0, 16, 64), (0, 16, 64), (0, 1, 4, 8), (0, 16, 64)
DENSE = {"embedding": 1.0, "final_layernorm": 2.0, "layernorm": 3.0, "qkv_proj": 10.0}
DENSE |= dict.fromkeys(("o_proj", "gate_up_proj", "act_fn", "down_proj"), 0.0)
META = "model: tiny\narchitecture: llama\ntp_degrees: [1]\n"


def attention(chunk: int, prefix: int, decodes: int, context: int) -> float:
    """Microseconds anyone can add up."""
    return 5 + 0.1 * chunk + 0.01 * chunk * prefix + 2 * decodes + 0.05 * decodes * context


def points() -> list[tuple[int, int, int, int]]:
    mixed = [
        (c, p, n, k) for c in CHUNKS for p in PREFIXES for n in DECODES for k in CONTEXTS if (c or not p) and (c or n)
    ]
    return [(c, p, n, k) for c, p, n, k in mixed if bool(n) == bool(k) and not (c and n == 8)]


def write_profile(folder: Path) -> None:
    """A profile of a GPU that decodes 8 at once alone, and never beside a prompt."""
    lines = ["prefill_chunk,kv_prefill,n_decode,kv_decode,time_us"]
    lines += [f"{c},{p},{n},{k},{attention(c, p, n, k)}" for c, p, n, k in points()]
    (folder / "attention.csv").write_text("\n".join(lines))
    dense = [f"{name},{tokens},{us * tokens}" for name, us in DENSE.items() for tokens in (1, 8, 64)]
    (folder / "dense.csv").write_text("\n".join(["layer,tokens,time_us", *dense]))
    heads = [f"{name},{n},{us + n}" for name, us in (("lm_head", 100), ("sampler", 20)) for n in (1, 8)]
    (folder / "per_sequence.csv").write_text("\n".join(["layer,sequences,time_us", *heads]))
    (folder / "meta.yaml").write_text(META + "skew_fit: {enabled: false}\n")
