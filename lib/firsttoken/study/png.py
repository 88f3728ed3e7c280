"""PNG files of at most 64 colours: a third of the bytes, for a slightly other hue of pale bands."""

from __future__ import annotations

import io

COLOURS = 64


def few_colours(png: bytes) -> bytes:
    """The same picture on white with a palette of ``COLOURS``; pure, so that a figure drawn twice is one file.

    The palette covers all colours of the picture. Pillow's usual one is made for the colours that most pixels have and
    leaves out that of a small marker: it drew a green triangle black.
    """
    from PIL import Image

    drawn = Image.open(io.BytesIO(png)).convert("RGBA")
    flat = Image.new("RGB", drawn.size, "white")
    flat.paste(drawn, mask=drawn.getchannel("A"))
    small = io.BytesIO()
    few = flat.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    few.save(small, "PNG", optimize=True)
    return small.getvalue()
