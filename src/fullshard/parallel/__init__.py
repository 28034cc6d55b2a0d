"""Processes that work together: the Accelerator, how it wraps a model, and how ranks agree.

What may come in: what needs Accelerate or a process group and is not about one step or one file.
"""
