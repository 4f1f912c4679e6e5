"""The Archon training engine: the only room with torch."""
