"""Executors: what runs stage programs."""
