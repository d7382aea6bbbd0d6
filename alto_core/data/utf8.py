"""A text file's bytes, without a byte order mark. One in UTF-16 is refused as a whole, instead of line by line."""

from __future__ import annotations

import codecs
from pathlib import Path

from alto_core.errors import DataError


def read_utf8(path: Path) -> bytes:
    """What a file holds; single bytes of it may still be no UTF-8.

    Raises:
        DataError: it cannot be read, or is UTF-16, as some editors and spreadsheets save "Unicode".
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}.") from None
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise DataError(f"{path}: got UTF-16, expected UTF-8. Save the file as UTF-8.")
    return content.removeprefix(codecs.BOM_UTF8)
