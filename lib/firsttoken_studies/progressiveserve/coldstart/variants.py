"""The ways to start that are compared (standard library only: a trial reads this before it imports torch)."""

from __future__ import annotations

from dataclasses import dataclass

from firsttoken.study.errors import ProfileError


@dataclass(frozen=True)
class StartVariant:
    """A way in which a trial gets its first token.

    ``peer`` names a loader of ``rival_loaders``, for which an ``early`` start has the system bring the files
    into memory; otherwise ours loads ``stages`` of the staged checkpoint, with the prefill ``streamed`` behind the
    arriving layers or after them, reading ``early``, that is before torch is imported, over ``links`` wires, with
    sha256 sums compared unless ``verify`` is off.

    A ``lean`` start imports no transformers. It is for this disk and for a data server: a limit in the kernel holds
    back torch's own files too, of which a few pages are often cold, behind the weights that are read beside them. With
    ``torch_behind`` the first token is there before torch is imported, which comes behind it and takes the answer over.
    """

    name: str
    label: str
    peer: str = ""
    stages: tuple[int, ...] = ()
    streamed: bool = False
    early: bool = False
    links: int = 1
    verify: bool = False
    lean: bool = False
    torch_behind: bool = False


WHOLE, FIRST = (1, 2, 3), (1,)

VARIANTS = {
    variant.name: variant
    for variant in (
        StartVariant("read", "reading alone", stages=WHOLE),
        StartVariant("from_pretrained", "from_pretrained", peer="from_pretrained"),
        StartVariant("safetensors", "safetensors mmap", peer="safetensors"),
        StartVariant("runai", "runai-model-streamer", peer="runai"),
        StartVariant("fastsafetensors", "fastsafetensors", peer="fastsafetensors"),
        StartVariant("chunked", "chunked pool (ServerlessLLM-style)", peer="chunked"),
        StartVariant("whole", "ours, whole model", stages=WHOLE),
        StartVariant("whole_verified", "ours, whole, sha256 checked", stages=WHOLE, verify=True),
        StartVariant("whole_streamed", "ours, whole, streamed prefill", stages=WHOLE, streamed=True),
        StartVariant("whole_early", "ours, whole, read during imports", stages=WHOLE, streamed=True, early=True),
        StartVariant("two_links", "2 links (ParaServe-style)", stages=WHOLE, streamed=True, links=2),
        StartVariant("four_links", "4 links (ParaServe-style)", stages=WHOLE, streamed=True, links=4),
        StartVariant("progressive", "ours, progressive", stages=FIRST, streamed=True),
        StartVariant(
            "progressive_early", "ours, progressive, read during imports", stages=FIRST, streamed=True, early=True
        ),
        StartVariant("lean", "ours, whole, lean", stages=WHOLE, streamed=True, early=True, lean=True),
        StartVariant("lean_folder", "ours, plain folder, lean", peer="lean", early=True, lean=True),
        StartVariant(
            "whole_behind", "ours, whole, torch behind", stages=WHOLE, streamed=True, lean=True, torch_behind=True
        ),
        StartVariant(
            "progressive_behind",
            "ours, progressive, torch behind",
            stages=FIRST,
            streamed=True,
            lean=True,
            torch_behind=True,
        ),
        StartVariant("lean_progressive", "ours, progressive, lean", stages=FIRST, streamed=True, early=True, lean=True),
    )
}


def find_variant(name: str) -> StartVariant:
    """The variant called ``name``. Raises ProfileError when there is none."""
    if name not in VARIANTS:
        raise ProfileError(f"no cold-start variant {name!r}; known: {', '.join(VARIANTS)}")
    return VARIANTS[name]
