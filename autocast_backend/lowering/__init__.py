"""Autocast regions into smart casts: planned, proved and written."""
