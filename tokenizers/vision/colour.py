"""Embedded colour profiles (ICC): pixels of any space to sRGB, by LittleCMS.

A picture from a camera or a printer holds numbers of its own space; read as sRGB its colours are wrong (Adobe
RGB looks pale, CMYK garish). A profile that is damaged, too large or made for another kind of pixels is left
out, because the pixels are still good. So is one that changes nothing by more than a rounding, as those that
most pictures carry, so that such a picture has the tokens of its pixels.
"""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

MAX_PROFILE_BYTES = 4 << 20
# The profile's space to the mode whose pixels it is for.
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
# An RGB grid of 9 values a channel; the last, 255, is reached by the ninth step.
_PROBE_STEPS = 9


def to_srgb(picture: Image.Image) -> Image.Image:
    """A picture as RGB in sRGB, or as RGBA where it has transparency, which no profile touches."""
    profile = picture.info.get("icc_profile")
    transparent = picture.has_transparency_data
    plain = picture.convert("RGBA" if transparent else "RGB")
    if not isinstance(profile, bytes) or not 0 < len(profile) <= MAX_PROFILE_BYTES:
        return plain
    mode = _mode_of(picture)
    transform = _transform(profile, mode)
    if transform is None:
        return plain
    # Grey and CMYK are taken as they are; all else has become RGB, its transparency apart.
    source = plain.convert("RGB") if mode == "RGB" else picture.convert(mode)
    try:
        converted = ImageCms.applyTransform(source, transform)
    except ImageCms.PyCMSError:
        return plain
    assert converted is not None
    if transparent:
        converted.putalpha(plain.getchannel("A"))
    return converted


def _mode_of(picture: Image.Image) -> str:
    if picture.mode in ("1", "L", "LA"):
        return "L"
    return "CMYK" if picture.mode == "CMYK" else "RGB"


@lru_cache(maxsize=8)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """From a profile to sRGB for pixels of ``mode``; None where it can't be used or changes nothing."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if _MODES.get(source.profile.xcolor_space.strip()) != mode:
            return None
        transform = ImageCms.buildTransform(
            source,
            ImageCms.createProfile("sRGB"),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            # No cache: the transform keeps no state, whatever pictures and threads use it.
            ImageCms.Flags.BLACKPOINTCOMPENSATION | ImageCms.Flags.NOCACHE,
        )
        if mode != "CMYK":
            probe = _probe(mode)
            changed = np.asarray(ImageCms.applyTransform(probe, transform), np.int16)
            if np.abs(changed - np.asarray(probe.convert("RGB"), np.int16)).max() <= 1:
                return None
    except Exception:  # a damaged profile: LittleCMS and the code around it raise nearly any type
        return None
    return transform


def _probe(mode: str) -> Image.Image:
    """Colours that show whether a transform changes any."""
    if mode == "L":
        return Image.fromarray(np.arange(256, dtype=np.uint8)[None])
    steps = np.linspace(0, 255, _PROBE_STEPS).astype(np.uint8)
    colours = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(1, -1, 3)
    return Image.fromarray(np.ascontiguousarray(colours))
