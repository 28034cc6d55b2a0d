"""The recipe: what to train, read strictly from YAML and command line into frozen dataclasses, checked before a run starts.

What may come in: anything that can be said of a recipe without torch. How it is sharded is `placement`; what it costs is `plan`.
"""
