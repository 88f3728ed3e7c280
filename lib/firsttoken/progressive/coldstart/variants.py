"""The ways to start that are compared (standard library only: a trial reads this before it imports torch)."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class Variant:
    """How a trial gets its first token.

    ``peer`` names a loader of ``loading.peers``; otherwise ours loads ``stages`` of the staged checkpoint, with the
    prefill ``streamed`` behind the arriving layers or after them, reading ``early``, that is before torch is
    imported, over ``links`` wires, with sha256 sums compared unless ``verify`` is off.
    """

    name: str
    label: str
    peer: str = ""
    stages: tuple[int, ...] = ()
    streamed: bool = False
    early: bool = False
    links: int = 1
    verify: bool = False


WHOLE, FIRST = (1, 2, 3), (1,)

VARIANTS = {
    variant.name: variant
    for variant in (
        Variant("read", "reading alone", stages=WHOLE),
        Variant("from_pretrained", "from_pretrained", peer="from_pretrained"),
        Variant("safetensors", "safetensors mmap", peer="safetensors"),
        Variant("runai", "runai-model-streamer", peer="runai"),
        Variant("fastsafetensors", "fastsafetensors", peer="fastsafetensors"),
        Variant("chunked", "chunked pool (ServerlessLLM-style)", peer="chunked"),
        Variant("whole", "ours, whole model", stages=WHOLE),
        Variant("whole_verified", "ours, whole, sha256 checked", stages=WHOLE, verify=True),
        Variant("whole_streamed", "ours, whole, streamed prefill", stages=WHOLE, streamed=True),
        Variant("whole_early", "ours, whole, read during imports", stages=WHOLE, streamed=True, early=True),
        Variant("two_links", "2 links (ParaServe-style)", stages=WHOLE, streamed=True, links=2),
        Variant("four_links", "4 links (ParaServe-style)", stages=WHOLE, streamed=True, links=4),
        Variant("progressive", "ours, progressive", stages=FIRST, streamed=True),
        Variant("progressive_early", "ours, progressive, read during imports", stages=FIRST, streamed=True, early=True),
    )
}


def find_variant(name: str) -> Variant:
    """The variant called ``name``. Raises ProfileError when there is none."""
    if name not in VARIANTS:
        raise ProfileError(f"no cold-start variant {name!r}; known: {', '.join(VARIANTS)}")
    return VARIANTS[name]
