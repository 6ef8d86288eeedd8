"""Draft proposers: they change speed only, never the text."""
