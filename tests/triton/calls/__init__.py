"""One module for each file of kernels: ``CALLS`` names calls of it, as a user's tensors would make them.

The names say what is called; :mod:`tests.triton.hopper_build` compiles what they launch, on any machine.
"""
