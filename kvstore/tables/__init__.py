"""Models, hardware and measured efficiencies as tables: package data, and what reads it."""
