"""C++ sources of the CPU kernels and what builds and loads them."""
