"""Memory and communication of a step, measured while it runs.

What may come in: counters. A module here measures what the module of the same name in `plan` predicts.
"""
