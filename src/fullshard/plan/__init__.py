"""What a training step takes and sends, computed from the two YAMLs alone: known before a GPU is rented.

What may come in: formulas for memory and communication. The same quantities, measured, are in `measure`. No torch.
"""
