"""How keys and values lie in a pool: page by page, each with room for so many places of one row."""

from __future__ import annotations

PAGE_PLACES = 32
"""Half a page is lost per row; a smaller one makes tables longer."""
