"""The engine's kernels: C++ sources, and what compiles them."""
