"""Graph in, graph out: one pass a file. Imports torch and itself only."""
