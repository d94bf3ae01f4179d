"""Unpacking a gzipped body, within bounds."""

import zlib
from typing import Final

from pipeline.web.problems import Problem

MEMBERS_MAX: Final = 100  # as of files that were put together; each costs time, however small it is


def gunzip(packed: bytes, limit: int) -> bytes:
    """Return what is packed.

    Args:
        limit: how many bytes that may be.

    Raises:
        Problem: ``bad_gzip``, ``body_too_long``.
    """
    unpacked = bytearray()
    for _ in range(MEMBERS_MAX):
        member = zlib.decompressobj(wbits=31)
        try:
            unpacked += member.decompress(packed, limit - len(unpacked) + 1)
        except zlib.error as exc:
            raise Problem("bad_gzip", "The body can't be unpacked.") from exc
        if len(unpacked) > limit:
            raise Problem("body_too_long", f"At most {limit} bytes are allowed, unpacked.")
        if not member.eof:
            break
        packed = member.unused_data
        if not packed:
            return bytes(unpacked)
    raise Problem("bad_gzip", "The body ends too early, or has too many parts.")
