"""Numbers that both sides of the system-call boundary share."""

from __future__ import annotations

PAGE_ENTRIES = 32
"""Entries in a page. One number for every tier, file and kernel: changing it changes the image format."""
