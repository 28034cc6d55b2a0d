"""A run's files: checkpoints that continue it exactly, and the export that transformers opens.

What may come in: what is written and read for that, and how it is known to be whole.
"""
