"""Adapters to frameworks that bring their own Megatron model, one module each."""
