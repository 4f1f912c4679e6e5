"""Archon: durable reinforcement learning for agents in ordinary use."""

__version__ = "0.1.0"
