"""Measure, predict and choose the hierarchy."""
