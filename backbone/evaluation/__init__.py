"""Judges and held-out figures."""
