"""Pretrain Llama models under FSDP with Accelerate."""

__version__ = "0.1.0"
