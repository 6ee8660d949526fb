"""The torch operators behind the public functions, with their gradients, shapes and FLOP counts."""
