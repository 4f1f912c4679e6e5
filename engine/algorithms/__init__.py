"""Losses and advantages as pure functions; each has a float64 reference in its tests."""
