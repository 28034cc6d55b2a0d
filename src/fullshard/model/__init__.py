"""The model, its loss and its optimizer, as functions of tensors.

What may come in: model families, objectives, optimizers, and where a shard keeps a parameter. No Accelerator, no files.
"""
