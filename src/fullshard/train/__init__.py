"""The training loop and what surrounds it: step, evaluation, logging, leaving, the run folder.

What may come in: what happens at a step or around all of them. It may use every other package.
"""
