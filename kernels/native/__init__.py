"""The C++ kernels for CPUs: compiled at first use with the machine's compiler, or beforehand for wheels."""
