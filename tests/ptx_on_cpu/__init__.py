"""Runs the PTX that nvcc emitted for csrc/cuda on the CPU, in numpy, and checks every access to memory.

g++ running the source (tests/cuda_on_cpu) shares every misreading of CUDA that our stand-in for its header has; this
reads what the compiler made of the source, by the rules of NVIDIA's "PTX ISA". program.py reads the text,
instructions.py gives each instruction its meaning, memory.py is the address spaces, machine.py the threads and who runs
next, fences.py what is proved from the text alone, device.py compiles and launches.
"""
