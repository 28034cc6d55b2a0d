"""The accelerate YAML: on how many processes, sharded how and in what precision, read as the launcher reads it.

What may come in: keys of that YAML and of the launcher's command line, and whether a recipe fits them. No torch, no accelerate.
"""
