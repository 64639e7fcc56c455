"""Runs the PTX that nvcc emitted for csrc/cuda on the CPU, in numpy, and checks every access to memory.

g++ running the source (tests/cuda_on_cpu) shares every misreading of CUDA that our stand-in for its header has; this
reads what the compiler made of the source, by the rules of NVIDIA's "PTX ISA".

program.py          the text: functions, instructions, variables
operands.py         registers, constants and addresses; decoding.py: one instruction's parts
instructions.py     which instructions there are; what they do is in arithmetic.py, accesses.py and control.py
memory.py           the address spaces and what an access must not do
machine.py          the threads of a grid, and which run next
fences.py           what the text alone proves about the order of stores
device.py           compiles with nvcc; cuda_runtime.h: launches as the launcher makes them
"""
