"""From the recipe's `data` section to a rank's batches: which files there are, how they are cut into streams, read, tokenized and packed.

What may come in: sources, file formats, tokenizers, orders of rows. Plain values and arrays; no Accelerator, no model.
"""
