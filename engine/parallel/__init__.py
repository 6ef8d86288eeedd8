"""Ranks: processes that hold a slice of one model and run the plans they are sent."""
